//! `tollgate check`

use tollgate::plan::Policy;

use super::{ConfigArgs, Usage, say};

pub(super) fn run(config: &ConfigArgs) -> anyhow::Result<()> {
    let loaded = config.load()?;
    let read: Vec<_> = loaded.files.iter().map(|file| file.display().to_string()).collect();
    let (plans, keys) = (loaded.policy.plans.len(), loaded.policy.keys.len());
    let policy = Policy::new(loaded.policy).map_err(|error| Usage(error.to_string()))?;
    let routes = policy.routes.routes().len();
    let read = if read.is_empty() { "the built-in example".to_owned() } else { read.join(", ") };
    say(format_args!("ok: {plans} plans, {routes} routes, {keys} keys; read {read}"));
    Ok(())
}
