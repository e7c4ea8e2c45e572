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
    let (plans, routes, keys) = (count(plans, "plan"), count(routes, "route"), count(keys, "key"));
    say(format_args!("ok: {plans}, {routes}, {keys}; read {read}"));
    Ok(())
}

fn count(number: usize, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}
