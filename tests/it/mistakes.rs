//! Configurations that must be refused, with the field named, and keys that must not change on the way in.

use crate::support::{Backend, Config, Finished, Gateway, run, sha256_hex};

/// A plan whose limits are `limits`, on an upstream that nobody calls.
fn plan(limits: &str) -> String {
    valid().plan("free", limits).text()
}

fn valid() -> Config {
    Config::bare("127.0.0.1:9".parse().unwrap()).route("rest", "/*", "")
}

/// Fails unless both `check` and `serve` refuse `config` with exit code 64 and name everything in `wanted`.
#[track_caller]
fn refused(config: &str, environment: &[(&str, &str)], wanted: &[&str]) {
    for verb in ["check", "serve"] {
        let Finished { code, output } = run(verb, config, environment);
        assert_eq!(code, 64, "{verb} of\n{config}\nsaid\n{output}");
        for word in wanted {
            // Without regard to case: a variable of the environment is named as it is written there.
            let said = output.to_lowercase().contains(&word.to_lowercase());
            assert!(said, "{verb} does not say {word:?}:\n{output}");
        }
        assert!(!output.contains("panicked"), "{output}");
    }
}

#[test]
fn a_valid_configuration_is_accepted() {
    // The counterpart of all below: a check that refuses everything would pass them.
    let Finished { code, output } = run("check", &plan(r#"{ name = "minute", limit = 5, per = "1m" }"#), &[]);
    assert_eq!(code, 0, "{output}");
}

#[test]
fn zero_is_refused_by_name() {
    // NUM-5: zero meant "deny all", "unlimited", "1" and "refused" in five projects, and operators relied on each.
    refused(&plan(r#"{ name = "minute", limit = 0, per = "1m" }"#), &[], &["plans.free", "limit"]);
    refused(
        &plan(r#"{ name = "bucket", limit = 5, per = "1m", algorithm = "token_bucket", burst = 0 }"#),
        &[],
        &["plans.free", "burst"],
    );
    let on_a_route = valid().plan("free", "").plan_on_route(
        "free",
        "rest",
        r#"{ name = "minute", limit = 0, per = "1m" }"#,
    );
    refused(&on_a_route.text(), &[], &["plans.free.routes.rest", "limit"]);
    let costs_nothing = Config::bare("127.0.0.1:9".parse().unwrap()).route("rest", "/*", "cost = 0");
    refused(&costs_nothing.text(), &[], &["routes.rest", "cost"]);
}

#[test]
fn senseless_amounts_are_refused_by_name() {
    // NUM-6: "greater than zero" let infinity through, and 1e-9 waited for ever.
    for (limit, wanted) in [
        ("limit = -1, per = \"1m\"", "-1"),
        ("limit = inf, per = \"1m\"", "inf"),
        ("limit = nan, per = \"1m\"", "NaN"),
        ("limit = 1e-9, per = \"1m\"", "limit"),
    ] {
        refused(&plan(&format!("{{ name = \"minute\", {limit} }}")), &[], &["limit", wanted]);
    }
    for per in ["\"0s\"", "\"-5s\"", "\"1e-9s\"", "\"inf\"", "\"nan\"", "10", "\"10\"", "\"\""] {
        refused(&plan(&format!("{{ name = \"minute\", limit = 5, per = {per} }}")), &[], &["per"]);
    }
}

#[test]
fn a_span_that_overflows_is_refused_by_name() {
    // TTL-5: an expiry ten thousand years ahead overflows inside Redis, and the key is gone at once.
    for per in ["1000000000000s", "10000000000000000s", "99999999999999999999999d"] {
        refused(&plan(&format!("{{ name = \"age\", limit = 5, per = \"{per}\" }}")), &[], &["per"]);
    }
}

#[test]
fn senseless_values_in_the_environment_are_refused_too() {
    // NUM-6: the checks sat in the file reader, and the environment came later.
    for value in ["-20ms", "0ms", "inf", "nan", "20", "1e-9s"] {
        refused(
            &valid().text(),
            &[("TOLLGATE__STORE__KIND", "redis"), ("TOLLGATE__STORE__REDIS__BUDGET", value)],
            &["BUDGET"],
        );
    }
}

#[test]
fn a_typo_is_refused_with_its_path_and_a_suggestion() {
    // CFG-2: unknown keys were dropped, the default ruled, and all checks were green for months.
    refused(
        &plan(r#"{ name = "minute", limt = 5, per = "1m" }"#),
        &[],
        &["plans.free", "limt", "did you mean", "did you mean `limit`?"],
    );
    refused(
        &valid().table("[store]\non_falure = \"deny\"").text(),
        &[],
        &["store", "on_falure", "did you mean", "on_failure"],
    );
    refused(&valid().table("[quotas]\nfree = 5").text(), &[], &["quotas"]);
    refused(
        &valid().server("lisen = \"127.0.0.1:0\"").text(),
        &[],
        &["server", "lisen", "did you mean", "listen"],
    );
}

#[test]
fn a_name_that_does_not_exist_is_refused() {
    // CFG-2: a plan or an upstream that is misspelt where it is used is the same silent hole.
    refused(&valid().key("k", "one", "fre").plan("free", "").text(), &[], &["keys.key_1", "fre"]);
    refused(
        &valid().table("[routes.lost]\npath = \"/lost\"\nupstream = \"apj\"").text(),
        &[],
        &["routes.lost", "apj"],
    );
    refused(&valid().anonymous("nobody").text(), &[], &["identity.anonymous", "nobody"]);
    refused(
        &valid()
            .plan("free", "")
            .plan_on_route("free", "serch", r#"{ name = "minute", limit = 5, per = "1m" }"#)
            .text(),
        &[],
        &["plans.free", "serch"],
    );
}

#[test]
fn all_mistakes_are_told_at_once() {
    // CFG-2: one mistake per start makes ten starts of ten mistakes.
    let config = valid()
        .table("[plans.free]\nlimits = [{ name = \"minute\", limt = 5, per = \"1m\" }]")
        .table("[plans.pro]\nlimits = [{ name = \"minute\", limit = 5, per = 60 }]")
        .table("[routes.lost]\npath = \"/lost\"\nupstream = \"apj\"");
    refused(&config.text(), &[], &["limt", "plans.pro", "apj"]);
}

#[test]
fn a_call_that_can_never_pass_is_a_mistake() {
    // SIG-1: a call that costs more than the limit ever holds is refused for ever, and no Retry-After can help.
    let config = Config::bare("127.0.0.1:9".parse().unwrap())
        .route("dear", "/dear", "cost = 6")
        .plan("free", r#"{ name = "minute", limit = 5, per = "1m" }"#);
    refused(&config.text(), &[], &["routes.dear", "cost", "free"]);
}

#[test]
fn a_misspelt_environment_variable_is_refused() {
    // CFG-2 in the environment: an override with a typo did nothing, without a word.
    refused(&valid().text(), &[("TOLLGATE__SERVER__LISEN", "127.0.0.1:0")], &["lisen"]);
}

#[test]
fn a_key_that_looks_like_a_number_stays_as_written() {
    // CFG-4: 00123456 was read as a number, and the key that worked was 123456.
    let odd = ["00123456", "1e5", "0x1F", "true", "null", "12345678901234567890"];
    let backend = Backend::ok();
    let config = odd.iter().enumerate().fold(Config::shared(&backend), |config, (number, key)| {
        config.key(key, &format!("odd_{number}"), "free")
    });
    let gateway = Gateway::start(&config);
    for key in odd {
        gateway.get("/x").key(key).send().expect(200);
    }
    for other in ["123456", "100000", "31", "0123456", "12345678901234567000"] {
        gateway.get("/x").key(other).send().expect(401);
    }
}

#[test]
fn names_that_look_like_other_types_stay_as_written() {
    // CFG-4: what is left to be misread is the account, the plan and the id, also in the environment.
    let backend = Backend::ok();
    let table = format!(
        "[keys.0012]\nhash = \"sha256:{}\"\naccount = \"007\"\nplan = \"free\"",
        sha256_hex("k-numbers")
    );
    let gateway = Gateway::start_with(
        &Config::shared(&backend).table(&table).text(),
        &[("TOLLGATE__KEYS__0012__ACCOUNT", "00123456")],
    );
    gateway.get("/x").key("k-numbers").send().expect(200);
    let line = &gateway.access_log(1)[0];
    assert_eq!(line["account"], "00123456", "{line}");
}
