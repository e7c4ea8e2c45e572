//! Every panel and every alert has something to show: a real gateway, scraped by a real Prometheus.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use tollgate::observe::Metrics;

use crate::support::backend::response;
use crate::support::{
    Backend, Config, Connection, Gateway, Prometheus, Redis, Request, Sample, eventually, tree,
};

const TOKEN: &str = "a-token-of-the-dashboards-test";

/// What stands for Grafana's intervals: longer than all of the test, so that every rate has its two samples.
const INTERVAL: &str = "1m";

/// An expression of a dashboard.
#[derive(Debug)]
struct Panel {
    title: String,
    expression: String,
    legend: String,
}

/// Expressions that may have no data, by what they contain, and why.
const EMPTY_BY_NATURE: &[(&str, &str)] =
    &[("ALERTS{", "no alert fires within seconds: each waits a minute or more")];

/// Expressions that are zero in this test, by what they contain, and why.
const ZERO_BY_NATURE: &[(&str, &str)] = &[
    ("tollgate_memory_callers", "Redis answers, so nobody is counted in memory"),
    ("tollgate_store_breaker", "Redis answers, so its breaker is healthy"),
    ("tollgate_store_errors_total", "Redis answers, and refuses nothing"),
];

/// All expressions of all dashboards, wherever they stand.
fn panels() -> Vec<Panel> {
    let mut panels = Vec::new();
    for file in tree::files("grafana/dashboards", ".json") {
        let dashboard: Value = serde_json::from_str(&tree::text(&file)).unwrap();
        collect(&dashboard, &file, &mut panels);
    }
    panels
}

fn collect(value: &Value, title: &str, panels: &mut Vec<Panel>) {
    match value {
        Value::Object(fields) => {
            let own = ["title", "name"].iter().find_map(|name| fields.get(*name)?.as_str());
            let title = own.unwrap_or(title);
            if let Some(expression) = fields.get("expr") {
                let legend = fields.get("legendFormat").and_then(Value::as_str).unwrap_or_default();
                panels.push(Panel {
                    title: title.to_owned(),
                    expression: expression.as_str().expect("an expression is a text").to_owned(),
                    legend: legend.to_owned(),
                });
            }
            fields.values().for_each(|field| collect(field, title, panels));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, title, panels)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The expression as Grafana sends it when all plans and routes are chosen.
///
/// Without its fallback to zero: with it there is always something to draw, right or wrong.
fn sent(expression: &str) -> String {
    let mut text = expression.replace(" or vector(0)", "");
    for variable in ["plan", "route"] {
        for form in [format!("${{{variable}:regex}}"), format!("${{{variable}}}"), format!("${variable}")] {
            text = text.replace(&form, ".*");
        }
    }
    for interval in ["$__rate_interval", "$__interval"] {
        text = text.replace(interval, INTERVAL);
    }
    assert!(!text.contains('$'), "a variable that this test does not know: {text}");
    text
}

/// The reason in a list of exceptions, if this expression is one.
fn reason<'a>(exceptions: &[(&str, &'a str)], expression: &str) -> Option<&'a str> {
    exceptions.iter().find(|(part, _)| expression.contains(part)).map(|(_, reason)| *reason)
}

/// The labels that a legend names: `{{plan}}`.
fn legend_labels(legend: &str) -> Vec<&str> {
    legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next()).map(str::trim).collect()
}

/// The labels that an expression chooses or groups by.
fn labels_used(expression: &str) -> BTreeSet<String> {
    let braces = expression.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let matched = braces
        .flat_map(|matchers| matchers.split('"').step_by(2))
        .filter_map(|matcher| matcher.split(['=', '!']).next())
        .map(|name| name.trim_matches([',', ' ']));
    let grouped = ["by (", "without (", "on (", "ignoring ("]
        .iter()
        .flat_map(|word| expression.split(word).skip(1))
        .filter_map(|rest| rest.split(')').next())
        .flat_map(|names| names.split(','))
        .map(str::trim);
    matched.chain(grouped).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The names in a text that are metrics of ours.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
    text.split(|letter: char| !is_name(letter))
        .filter(|word| word.starts_with("tollgate_"))
        .map(str::to_owned)
        .collect()
}

/// Whether the gateway has this metric, or the histogram that this is a part of.
fn exists(name: &str) -> bool {
    let base = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
    Metrics::NAMES.contains(&name) || base.is_some_and(|base| Metrics::NAMES.contains(&base))
}

/// Several routes and plans, and nobody without a key. `/broken` answers 500.
fn gateway(backend: &Backend, redis: &Redis) -> Gateway {
    let config = Config::bare(backend.address())
        .route("api", "/api/*", "")
        .route("search", "/search", "methods = [\"GET\"]")
        .route("broken", "/broken", "charge_when = \"not_5xx\"")
        .with_shared_callers()
        .plan_on_route("pro", "search", r#"{ name = "tried", limit = 1, per = "10m", enforce = "shadow" }"#)
        .table(&redis.tables("deny", "2s"));
    Gateway::start_with(&config.text(), &[("TOLLGATE__ADMIN__TOKEN", TOKEN)])
}

/// One of everything that a dashboard tells apart.
fn make_traffic(gateway: &Gateway) {
    let mut connection = gateway.connect();
    for (target, key, status) in [
        ("/api/a", "k-pro-1", 200),
        ("/search", "k-pro-1", 200),
        ("/search", "k-pro-1", 200),
        ("/broken", "k-pro-1", 500),
        ("/nowhere", "k-pro-1", 404),
        ("/api/a", "nobody", 401),
    ] {
        Request::get(target).key(key).on(&mut connection).expect(status);
    }
    // Five are allowed in ten seconds.
    let of_free = (0..6).map(|_| Request::get("/api/a").key("k-free-1").on(&mut connection).status);
    assert!(of_free.into_iter().any(|status| status == 429));
}

/// A request that is being worked on as long as the connection lives: its body does not come to an end.
fn hold_request(gateway: &Gateway) -> Connection {
    gateway
        .raw(b"POST /api/held HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k-pro-1\r\nContent-Length: 2\r\n\r\nx")
}

#[test]
fn every_panel_has_data() {
    // A panel that was renamed away, or whose label is misspelt, is empty on the day it is needed, and looks calm.
    let redis = Redis::start();
    let backend = Backend::answering(|request| {
        let status = if request.target() == "/broken" { "500 Internal Server Error" } else { "200 OK" };
        response(status, &[], b"ok")
    });
    let gateway = gateway(&backend, &redis);
    let prometheus = Prometheus::start(gateway.admin_address(), TOKEN);
    let held = hold_request(&gateway);
    // A counter that is there for the first time has no rate yet. So: seen once, counted on, seen again.
    for _ in 0..2 {
        make_traffic(&gateway);
        prometheus.wait_for_scrape();
    }

    let panels = panels();
    assert!(panels.len() > 20, "{panels:#?}");
    let labels = prometheus.api("/api/v1/labels");
    let is_label = |name: &str| labels.as_array().is_some_and(|all| all.iter().any(|label| label == name));
    let mut faults = Vec::new();
    for panel in &panels {
        if reason(EMPTY_BY_NATURE, &panel.expression).is_some() {
            continue;
        }
        let expression = sent(&panel.expression);
        let samples = prometheus.query(&expression);
        let zero = reason(ZERO_BY_NATURE, &expression).is_some();
        let shows = |sample: &Sample| sample.value.is_finite() && (zero || sample.value > 0.0);
        if !samples.iter().any(shows) {
            faults.push(format!("{}: no data for {expression}: {samples:?}", panel.title));
        }
        for label in legend_labels(&panel.legend) {
            if samples.iter().any(|sample| sample.labels.get(label).is_none_or(String::is_empty)) {
                faults.push(format!("{}: no {label} for the legend in {samples:?}", panel.title));
            }
        }
        for label in labels_used(&expression).iter().filter(|label| !is_label(label)) {
            faults.push(format!("{}: no metric has the label {label}", panel.title));
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");

    tells_the_answers_apart(&prometheus);
    offers_the_plans_and_routes(&prometheus);
    rules_are_evaluated(&prometheus);
    drop(held);
}

/// The traffic that was made, as the panel of HTTP codes sees it.
fn tells_the_answers_apart(prometheus: &Prometheus) {
    let samples = prometheus.query("sum by (code) (tollgate_requests_total)");
    let codes: BTreeSet<&str> = samples.iter().map(|sample| sample.labels["code"].as_str()).collect();
    assert_eq!(codes, ["200", "401", "404", "429", "500"].into());
}

/// The choices at the top of the dashboard: `label_values(metric, label)`.
fn offers_the_plans_and_routes(prometheus: &Prometheus) {
    let mut lists = 0;
    for file in tree::files("grafana/dashboards", ".json") {
        let dashboard: Value = serde_json::from_str(&tree::text(&file)).unwrap();
        let variables = dashboard["templating"]["list"].as_array().unwrap();
        for variable in variables.iter().filter(|variable| variable["type"] == "query") {
            let query = variable["query"]["query"].as_str().unwrap();
            let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
            let (metric, label) = inner.split_once(", ").unwrap();
            let values = prometheus.api(&format!("/api/v1/label/{label}/values?match[]={metric}"));
            let count = values.as_array().map_or(0, Vec::len);
            assert!(count >= 3, "{query}: {values}");
            lists += 1;
        }
    }
    assert!(lists >= 2, "plan and route can be chosen");
}

/// The alerts, with the same data. That each of them fires is shown by `promtool test rules`.
fn rules_are_evaluated(prometheus: &Prometheus) {
    let rules = || -> Vec<Value> {
        let groups = prometheus.api("/api/v1/rules");
        let groups = groups["groups"].as_array().unwrap().clone();
        groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
    };
    let rules = eventually("every rule to be evaluated", Duration::from_secs(10), || {
        let rules = rules();
        rules.iter().all(|rule| rule["health"] != "unknown").then_some(rules)
    });
    let written = tree::text("prometheus/alerts.yml").matches("- alert: ").count();
    assert_eq!(rules.len(), written);
    let labels = prometheus.api("/api/v1/labels");
    for rule in rules {
        assert_eq!(rule["health"], "ok", "{rule}");
        for label in labels_used(rule["query"].as_str().unwrap()) {
            let exists = labels.as_array().unwrap().iter().any(|known| *known == *label);
            assert!(exists, "{}: no metric has the label {label}", rule["name"]);
        }
    }
}

#[test]
fn dashboards_alerts_and_guides_name_only_metrics_that_exist() {
    // PromQL says nothing about a name that nobody exports: the alert just never fires.
    let files =
        [tree::files("grafana", ".json"), tree::files("prometheus", ".yml"), tree::files("docs", ".md")]
            .concat();
    let mut named = BTreeSet::new();
    for file in files {
        for name in metrics_in(&tree::text(&file)) {
            assert!(exists(&name), "{file}: there is no metric {name}");
            named.insert(name);
        }
    }
    assert!(named.len() > 8, "{named:?}");
}

#[test]
fn every_metric_is_in_the_manual() {
    let page = tree::text("docs/reference/metrics.md");
    for name in Metrics::NAMES {
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not in docs/reference/metrics.md");
    }
}

#[test]
fn alerts_have_the_same_names_in_rules_guides_and_dashboards() {
    // Whoever is woken by a name looks for it in the guide.
    let words = |text: &str| -> BTreeSet<String> {
        text.split(|letter: char| !letter.is_ascii_alphanumeric())
            .filter(|word| word.strip_prefix("Tollgate").is_some_and(|rest| !rest.is_empty()))
            .map(str::to_owned)
            .collect()
    };
    let alerts = words(&tree::text("prometheus/alerts.yml"));
    assert_eq!(words(&tree::text("docs/guides/dashboards-and-alerts.md")), alerts);
    assert_eq!(words(&tree::text("prometheus/alerts.test.yml")), alerts);
    for file in [tree::files("grafana/dashboards", ".json"), tree::files("docs", ".md")].concat() {
        let named = words(&tree::text(&file));
        assert!(named.is_subset(&alerts), "{file}: {named:?}");
    }
}

#[test]
fn the_readers_of_expressions_read_them() {
    let expression = r#"sum by (plan, limit) (rate(tollgate_decisions_total{plan=~"$plan", route!="a,b=c"}[$__rate_interval])) or vector(0)"#;
    assert_eq!(
        sent(expression),
        r#"sum by (plan, limit) (rate(tollgate_decisions_total{plan=~".*", route!="a,b=c"}[1m]))"#
    );
    assert_eq!(sent("a{b=~\"${plan:regex}\"}"), "a{b=~\".*\"}");
    assert_eq!(labels_used(expression), ["limit", "plan", "route"].map(str::to_owned).into());
    assert_eq!(metrics_in(expression), ["tollgate_decisions_total".to_owned()].into());
    assert_eq!(legend_labels("{{plan}} / {{ limit }}"), ["plan", "limit"]);
    assert!(exists("tollgate_store_seconds_count") && !exists("tollgate_store_second"));
}
