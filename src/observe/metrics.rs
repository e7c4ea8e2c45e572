//! Every metric, declared once. Labels come from the configuration and from fixed lists, never from a request, so no
//! client can make a new series.

use std::collections::HashMap;
use std::sync::Arc;

use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

use super::{Exchange, SettlementKind};

/// Seconds, from far below a millisecond (the gateway's own time) to the longest answers worth telling apart.
const LATENCY: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0,
];

/// Seconds of work that should take microseconds.
const FINE: &[f64] = &[
    0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.02, 0.025, 0.05, 0.1,
    0.25,
];

/// Declares the metrics: the doc comment is the HELP text, the list the labels.
macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $field:ident: $kind:ident $name:literal $labels:tt $(buckets $buckets:ident)?;)+) => {
        /// All metrics of the process. Made once, shared by all workers.
        #[derive(Debug)]
        pub struct Metrics {
            registry: Registry,
            $($(#[doc = $help])+ pub $field: $kind,)+
        }

        impl Metrics {
            /// All metrics at zero, in a registry of their own.
            ///
            /// # Errors
            /// Never in a tested build: a name or label list that is not valid.
            pub fn new() -> Result<Self, prometheus::Error> {
                let registry = Registry::new();
                // Memory, descriptors, processor time, the start: under the names that every Prometheus user knows.
                registry.register(Box::new(ProcessCollector::for_self()))?;
                $(
                    let help = [$($help),+].concat();
                    let $field = declare!($kind, $name, help.trim(), &$labels $(, $buckets)?)?;
                    registry.register(Box::new($field.clone()))?;
                )+
                Ok(Self { registry, $($field,)+ })
            }

            /// Every metric's name, for tests that hold dashboards and docs to it.
            pub const NAMES: &[&str] = &[$($name,)+];
        }
    };
}

macro_rules! declare {
    (IntCounterVec, $name:literal, $help:expr, $labels:expr) => {
        IntCounterVec::new(Opts::new($name, $help), $labels)
    };
    (IntGaugeVec, $name:literal, $help:expr, $labels:expr) => {
        IntGaugeVec::new(Opts::new($name, $help), $labels)
    };
    (IntCounter, $name:literal, $help:expr, $labels:expr) => {
        IntCounter::new($name, $help)
    };
    (IntGauge, $name:literal, $help:expr, $labels:expr) => {
        IntGauge::new($name, $help)
    };
    (Gauge, $name:literal, $help:expr, $labels:expr) => {
        Gauge::new($name, $help)
    };
    (HistogramVec, $name:literal, $help:expr, $labels:expr, $buckets:ident) => {
        HistogramVec::new(HistogramOpts::new($name, $help).buckets($buckets.to_vec()), $labels)
    };
}

metrics! {
    /// Requests that came to a decision, by outcome, the limit that refused, and who decided.
    decisions: IntCounterVec "tollgate_decisions_total" ["plan", "route", "outcome", "limit", "source"];
    /// Requests answered, by status code. 499: the client left before there was an answer.
    requests: IntCounterVec "tollgate_requests_total" ["route", "plan", "method", "code"];
    /// Seconds from the request's head to the end of the answer.
    request_seconds: HistogramVec "tollgate_request_seconds" ["route", "plan"] buckets LATENCY;
    /// Seconds until the answer's head that were spent in the gateway itself, the upstream excluded.
    overhead_seconds: HistogramVec "tollgate_overhead_seconds" ["route"] buckets FINE;
    /// Seconds until the upstream's answer began, by class of its status code.
    upstream_seconds: HistogramVec "tollgate_upstream_seconds" ["upstream", "code"] buckets LATENCY;
    /// Seconds that the store was asked, by how that ended.
    store_seconds: HistogramVec "tollgate_store_seconds" ["store", "result"] buckets FINE;
    /// Charges that were put right behind the answer, by kind: less than reserved, more, or a cost that is no number.
    settlements: IntCounterVec "tollgate_settlements_total" ["plan", "route", "kind"];
    /// Messages to Redis that were lost, since the start: charges not settled, slots that wait for their lease to end.
    messages_lost: IntCounter "tollgate_store_messages_lost_total" [];
    /// Whether Redis is asked, of several shards the worst: 0 healthy, 1 probing (callers return), 2 tripped (nobody asks).
    store_breaker: IntGauge "tollgate_store_breaker" [];
    /// How often Redis, or a shard of it, has failed so often that nobody asks it for a while, since the start.
    store_breaker_trips: IntCounter "tollgate_store_breaker_trips_total" [];
    /// Gateways that count in the same Redis, as far as it was heard; 0 before, and without Redis.
    store_gateways: IntGauge "tollgate_store_gateways" [];
    /// Callers whose use, while Redis was away, is yet to be written back to it.
    store_debtors: IntGauge "tollgate_store_debtors" [];
    /// Failures of the store since the start, by kind: of questions to it, and of attempts to connect.
    store_errors: IntCounterVec "tollgate_store_errors_total" ["kind"];
    /// 1 if Redis may evict counters when its memory is full, as far as the gateway may ask.
    store_may_evict: IntGauge "tollgate_store_may_evict" [];
    /// Requests that were refused because the gateway had too much to do, by what there was too much of.
    shed: IntCounterVec "tollgate_shed_total" ["plan", "reason"];
    /// Panics while a request was worked on: bugs. The request was answered with 500, or its answer cut short.
    panics: IntCounter "tollgate_panics_total" [];
    /// Requests that are being worked on.
    in_flight: IntGauge "tollgate_requests_in_flight" [];
    /// Callers that the memory store holds.
    memory_callers: IntGauge "tollgate_memory_callers" [];
    /// Decisions made on the shared overflow entry of a full memory store, since the start.
    memory_overflowed: IntCounter "tollgate_memory_overflowed_total" [];
    /// How reading the configuration again ended: applied, unchanged or refused.
    config_reloads: IntCounterVec "tollgate_config_reloads_total" ["result"];
    /// Whether the files, when they were last read, could be used: 1, or 0 while what was in force before stays in force.
    config_good: IntGauge "tollgate_config_last_reload_successful" [];
    /// How many settings in the files wait for a restart.
    config_waiting: IntGauge "tollgate_config_needs_restart" [];
    /// Always 1; the label says which configuration is in force, by a hash over its files.
    config_info: IntGaugeVec "tollgate_config_info" ["version"];
    /// When the configuration in force was read, in seconds since 1970.
    config_timestamp: Gauge "tollgate_config_last_good_timestamp_seconds" [];
    /// Always 1; the label says which build runs.
    build: IntGaugeVec "tollgate_build_info" ["version"];
}

impl Metrics {
    /// Brings what others count on their own, since the start, up to date.
    pub fn catch_up(&self, totals: Totals) {
        let Totals { memory_overflowed, messages_lost, breaker_trips } = totals;
        let counters = [
            (&self.memory_overflowed, memory_overflowed),
            (&self.messages_lost, messages_lost),
            (&self.store_breaker_trips, breaker_trips),
        ];
        for (counter, total) in counters {
            counter.inc_by(total.saturating_sub(counter.get()));
        }
    }

    /// Brings up to date what others know about the store: its failures by kind, since the start, and whether it may evict.
    pub fn catch_up_with_store(&self, failures: impl Iterator<Item = (&'static str, u64)>, may_evict: bool) {
        for (kind, total) in failures {
            let counter = self.store_errors.with_label_values(&[kind]);
            counter.inc_by(total.saturating_sub(counter.get()));
        }
        self.store_may_evict.set(may_evict.into());
    }

    /// The text that Prometheus scrapes.
    ///
    /// # Errors
    /// When a metric cannot be written as text.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// What others count on their own, since the start.
#[derive(Debug, Clone, Copy)]
pub struct Totals {
    /// Decisions on the shared entry of the memory store.
    pub memory_overflowed: u64,
    /// Messages to Redis that were lost.
    pub messages_lost: u64,
    /// How often breakers have tripped.
    pub breaker_trips: u64,
}

/// One worker's hold on the series it counts in.
///
/// An exchange counts in up to six series, and looking each of them up by its labels takes longer than counting. All
/// labels of an exchange together name one set of series, which is looked up once, without a lock.
#[derive(Debug)]
pub(super) struct Counter {
    metrics: Arc<Metrics>,
    /// By the label values of an exchange, joined with NUL. As many as there are series in the registry: their labels
    /// come from the configuration and fixed lists.
    series: HashMap<Box<[u8]>, Series>,
    key: Vec<u8>,
}

/// What one kind of exchange counts in.
#[derive(Debug)]
struct Series {
    decisions: Option<IntCounter>,
    requests: IntCounter,
    request_seconds: Histogram,
    overhead_seconds: Histogram,
    upstream_seconds: Option<Histogram>,
    store_seconds: Option<Histogram>,
    settlements: Option<IntCounter>,
    shed: Option<IntCounter>,
}

impl Counter {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, series: HashMap::new(), key: Vec::new() }
    }

    /// Counts one finished exchange.
    pub(super) fn count(&mut self, exchange: &Exchange<'_>) {
        self.write_key(exchange);
        if !self.series.contains_key(&*self.key) {
            self.series.insert(self.key.as_slice().into(), Series::of(exchange, &self.metrics));
        }
        if let Some(series) = self.series.get(&*self.key) {
            series.count(exchange);
        }
    }

    fn write_key(&mut self, exchange: &Exchange<'_>) {
        let store = exchange.store.map_or(["", ""], |(store, _, result)| [store, result.as_str()]);
        let upstream = exchange.upstream.map_or("", |(upstream, _)| upstream);
        let words = [
            exchange.plan,
            exchange.route,
            exchange.outcome.as_str(),
            exchange.limit,
            exchange.source,
            exchange.method,
            upstream,
            store[0],
            store[1],
            exchange.settlement.map_or("", SettlementKind::as_str),
            exchange.shed.unwrap_or_default(),
        ];
        self.key.clear();
        self.key.extend_from_slice(&exchange.status.to_be_bytes());
        for word in words {
            self.key.extend_from_slice(word.as_bytes());
            self.key.push(0);
        }
    }
}

impl Series {
    fn of(exchange: &Exchange<'_>, metrics: &Metrics) -> Self {
        let Exchange { route, plan, limit, source, method, .. } = *exchange;
        let code = Code::new(exchange.status);
        let decisions = exchange
            .outcome
            .label()
            .map(|outcome| metrics.decisions.with_label_values(&[plan, route, outcome, limit, source]));
        let upstream_seconds = exchange
            .upstream
            .map(|(upstream, _)| metrics.upstream_seconds.with_label_values(&[upstream, code.class()]));
        let store_seconds = exchange
            .store
            .map(|(store, _, result)| metrics.store_seconds.with_label_values(&[store, result.as_str()]));
        Self {
            decisions,
            requests: metrics.requests.with_label_values(&[route, plan, method, code.as_str()]),
            request_seconds: metrics.request_seconds.with_label_values(&[route, plan]),
            overhead_seconds: metrics.overhead_seconds.with_label_values(&[route]),
            upstream_seconds,
            store_seconds,
            settlements: exchange
                .settlement
                .map(|kind| metrics.settlements.with_label_values(&[plan, route, kind.as_str()])),
            shed: exchange.shed.map(|reason| metrics.shed.with_label_values(&[plan, reason])),
        }
    }

    fn count(&self, exchange: &Exchange<'_>) {
        self.requests.inc();
        self.request_seconds.observe(exchange.took.as_secs_f64());
        if let Some(decisions) = &self.decisions {
            decisions.inc();
        }
        if let Some(settlements) = &self.settlements {
            settlements.inc();
        }
        if let Some(shed) = &self.shed {
            shed.inc();
        }
        if let Some(overhead) = exchange.overhead {
            self.overhead_seconds.observe(overhead.as_secs_f64());
        }
        if let Some((series, (_, took))) = self.upstream_seconds.as_ref().zip(exchange.upstream) {
            series.observe(took.as_secs_f64());
        }
        if let Some((series, (_, took, _))) = self.store_seconds.as_ref().zip(exchange.store) {
            series.observe(took.as_secs_f64());
        }
    }
}

/// A status code as text, without an allocation.
struct Code([u8; 3], &'static str);

impl Code {
    fn new(status: u16) -> Self {
        let digit = |divisor: u16| b'0' + u8::try_from(status / divisor % 10).unwrap_or(0);
        let class = match status / 100 {
            1 => "1xx",
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            5 => "5xx",
            _ => "other",
        };
        Self([digit(100), digit(10), digit(1)], class)
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or("000")
    }

    fn class(&self) -> &'static str {
        self.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_declaration_is_valid_and_documented() {
        let metrics = Metrics::new().unwrap();
        metrics.in_flight.set(1);
        let text = metrics.render().unwrap();
        assert!(
            text.contains("# HELP tollgate_requests_in_flight Requests that are being worked on.\n"),
            "{text}"
        );
        assert!(text.contains("tollgate_requests_in_flight 1\n"), "{text}");
    }

    /// The names of metrics in `text`, without what a histogram adds to them.
    fn names_in(text: &str) -> std::collections::BTreeSet<&str> {
        let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let metrics = words.filter(|word| word.starts_with("tollgate_"));
        let plain = |name| {
            let ends = ["_bucket", "_sum", "_count"];
            ends.into_iter().find_map(|end| str::strip_suffix(name, end)).unwrap_or(name)
        };
        metrics.map(plain).collect()
    }

    #[test]
    fn the_reference_lists_every_metric_and_dashboards_use_no_other() {
        let all: std::collections::BTreeSet<&str> = Metrics::NAMES.iter().copied().collect();
        assert_eq!(names_in(include_str!("../../docs/reference/metrics.md")), all);
        let dashboard = names_in(include_str!("../../grafana/dashboards/tollgate.json"));
        let alerts = names_in(include_str!("../../prometheus/alerts.yml"));
        assert!(!dashboard.is_empty() && !alerts.is_empty());
        for name in dashboard.union(&alerts) {
            assert!(all.contains(name), "there is no metric {name}");
        }
    }

    #[test]
    fn codes_are_three_digits() {
        assert_eq!((Code::new(204).as_str(), Code::new(499).class()), ("204", "4xx"));
    }
}
