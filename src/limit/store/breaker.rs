//! Whether a store that fails is asked at all.
//!
//! Pure: moments and outcomes go in, phases come out; no clock is read and nobody is asked. While the breaker is tripped,
//! requests do without the store and cost it nothing; a [probe](Breaker::claim_probe) in the background finds out when it is
//! back. Then callers return to it a part at a time.
//!
//! It trips on failures in a row, which a store that is gone makes, and on a share of failures, which one that is merely slow
//! makes. The first number is Envoy's default for outliers (`consecutive_5xx`).

use std::time::{Duration, Instant};

/// So many failures in a row trip it.
const IN_A_ROW: u32 = 5;

/// It also trips when one of so many calls fails, over [`WINDOW`].
const ONE_IN: u32 = 4;

/// A share of fewer calls says nothing.
const CALLS_MIN: u32 = 20;

/// How long a call counts, in parts.
const WINDOW: usize = 10;
const PART: Duration = Duration::from_millis(100);

/// The pause between probes of a store that does not answer: the first, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// The pause behind a probe that was answered.
const PAUSE_ANSWERED: Duration = Duration::from_millis(20);

/// So many probes in a row must be answered before the first callers return; the first number, unless the store has failed
/// again on its last returns, once or more often. Then one that is not answered takes back as many as make up for it, and not
/// all: else a store that is late now and then, which is nothing to a healthy one, would never return. Probes then come at [`PAUSE_MIN`]: 5 s and a minute.
///
/// A store may answer every probe and fail under the load of the callers. Without this the breaker would flap.
const ANSWERS: [u32; 3] = [3, 50, 600];

/// It failed on its return if it trips on the way, or before it has been healthy for so long.
const TRIAL: Duration = Duration::from_secs(2);

/// Its bad returns are forgotten when it has been healthy for so long.
const FORGET: Duration = Duration::from_secs(60);

/// Which share of the callers, in percent, asks the store at each step of the return, and how long a step takes.
const STEPS: [u8; 3] = [10, 30, 60];
const STEP: Duration = Duration::from_millis(200);

/// So many failures end a return, if they come in a row or are one in [`ONE_IN`]: what a healthy store may do, one that returns
/// may do, too. Else one that sometimes fails would never return under a load.
const FAILED_ON_RETURN: u32 = 3;

/// Where a breaker stands. The values of the metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The store is asked.
    Healthy,
    /// It has answered probes, and is asked for some of the callers.
    Probing,
    /// Nobody asks it.
    Tripped,
}

impl Phase {
    /// The word in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Probing => "probing",
            Self::Tripped => "tripped",
        }
    }
}

/// The breaker of one store, or of one shard of it.
#[derive(Debug)]
pub(super) struct Breaker {
    state: State,
    /// How often in a row the store has failed on its return.
    bad_returns: usize,
    /// When the last return was complete; `None` if it has always been healthy.
    returned: Option<Instant>,
}

#[derive(Debug)]
enum State {
    Healthy { failed_in_a_row: u32, recent: Recent },
    Tripped { next_probe: Instant, pause: Duration, answered: u32 },
    Probing { since: Instant, failed_in_a_row: u32, calls: u32, failed: u32 },
}

impl State {
    fn healthy(now: Instant) -> Self {
        Self::Healthy { failed_in_a_row: 0, recent: Recent::since(now) }
    }
}

impl Breaker {
    /// A breaker that trusts its store, which nobody has asked yet.
    #[must_use]
    pub(super) fn new(now: Instant) -> Self {
        Self { state: State::healthy(now), bad_returns: 0, returned: None }
    }

    /// Where it stands. A return that lasts long enough is complete, so time alone can change this.
    pub(super) fn phase(&mut self, now: Instant) -> Phase {
        if let State::Probing { since, .. } = self.state
            && step(since, now).is_none()
        {
            self.state = State::healthy(now);
            self.returned = Some(now);
        }
        self.last_phase()
    }

    /// Where it stood when it was last looked at.
    #[must_use]
    pub(super) fn last_phase(&self) -> Phase {
        match self.state {
            State::Healthy { .. } => Phase::Healthy,
            State::Probing { .. } => Phase::Probing,
            State::Tripped { .. } => Phase::Tripped,
        }
    }

    /// Whether the store may be asked for a caller of this [draw](crate::limit::draw), from 0 to 99. The same callers return
    /// first at every gateway, so one caller is not decided here and there in turns.
    pub(super) fn admits(&mut self, now: Instant, draw: impl FnOnce() -> u8) -> bool {
        match (self.phase(now), &self.state) {
            (Phase::Healthy, _) => true,
            (Phase::Probing, State::Probing { since, .. }) => {
                step(*since, now).is_none_or(|percent| draw() < percent)
            }
            _ => false,
        }
    }

    /// Whether there is no doubt about the store: the last call that could fail has not.
    pub(super) fn is_beyond_doubt(&mut self, now: Instant) -> bool {
        self.phase(now);
        match self.state {
            State::Healthy { failed_in_a_row, .. } | State::Probing { failed_in_a_row, .. } => {
                failed_in_a_row == 0
            }
            State::Tripped { .. } => false,
        }
    }

    /// What became of a call that was admitted. What comes of it while nobody asks is of the time before.
    pub(super) fn record(&mut self, now: Instant, answered: bool) {
        self.phase(now);
        let trips = match &mut self.state {
            State::Healthy { failed_in_a_row, recent } => {
                *failed_in_a_row = if answered { 0 } else { *failed_in_a_row + 1 };
                recent.count(now, answered);
                !answered && (*failed_in_a_row >= IN_A_ROW || recent.is_bad())
            }
            State::Probing { failed_in_a_row, calls, failed, .. } => {
                *failed_in_a_row = if answered { 0 } else { *failed_in_a_row + 1 };
                *calls = calls.saturating_add(1);
                *failed += u32::from(!answered);
                let is_bad = *failed >= FAILED_ON_RETURN && failed.saturating_mul(ONE_IN) >= *calls;
                !answered && (*failed_in_a_row >= FAILED_ON_RETURN || is_bad)
            }
            State::Tripped { .. } => false,
        };
        if trips {
            self.trip(now);
        }
    }

    fn trip(&mut self, now: Instant) {
        let is_returning = matches!(self.state, State::Probing { .. });
        let since = self.returned.map(|returned| now.saturating_duration_since(returned));
        if is_returning || since.is_some_and(|since| since < TRIAL) {
            self.bad_returns += 1;
        } else if since.is_none_or(|since| since >= FORGET) {
            self.bad_returns = 0;
        }
        self.state = State::Tripped { next_probe: now + PAUSE_MIN, pause: PAUSE_MIN, answered: 0 };
    }

    /// When the next probe is due; `None` if none is needed.
    #[must_use]
    pub(super) fn next_probe(&self) -> Option<Instant> {
        match self.state {
            State::Tripped { next_probe, .. } => Some(next_probe),
            State::Healthy { .. } | State::Probing { .. } => None,
        }
    }

    /// Whether the last probes were answered, so that callers may return soon.
    #[must_use]
    pub(super) fn is_answering(&self) -> bool {
        matches!(self.state, State::Tripped { answered: 1.., .. })
    }

    /// Whether whoever asks is to probe now. Nobody else is told so before `patience` has passed, which the probe may take.
    pub(super) fn claim_probe(&mut self, now: Instant, patience: Duration) -> bool {
        match &mut self.state {
            State::Tripped { next_probe, .. } if *next_probe <= now => {
                *next_probe = now + patience;
                true
            }
            _ => false,
        }
    }

    /// What became of a probe. `jitter`, from 0 to 1, lengthens the pause by up to a quarter, so that the gateways of a fleet
    /// do not probe in step.
    pub(super) fn probed(&mut self, now: Instant, answered: bool, jitter: f64) {
        let bad_returns = self.bad_returns;
        let State::Tripped { next_probe, pause, answered: in_a_row } = &mut self.state else { return };
        *in_a_row = match answered {
            true => *in_a_row + 1,
            // It answers and fails in turns, or a probe was late: it must answer more often than what trips it.
            false if bad_returns > 0 => in_a_row.saturating_sub(ONE_IN - 1),
            false => 0,
        };
        if *in_a_row >= ANSWERS[bad_returns.min(ANSWERS.len() - 1)] {
            self.state = State::Probing { since: now, failed_in_a_row: 0, calls: 0, failed: 0 };
            return;
        }
        let (wait, next) = match answered {
            true if bad_returns == 0 => (PAUSE_ANSWERED, PAUSE_MIN),
            true => (PAUSE_MIN, PAUSE_MIN),
            false => (*pause, (*pause * 2).min(PAUSE_MAX)),
        };
        *pause = next;
        *next_probe = now + wait.mul_f64(1.0 + jitter.clamp(0.0, 1.0) / 4.0);
    }
}

/// The share of the callers that a return which began then has reached; `None` when it is complete.
fn step(since: Instant, now: Instant) -> Option<u8> {
    let steps = now.saturating_duration_since(since).as_millis() / STEP.as_millis();
    usize::try_from(steps).ok().and_then(|steps| STEPS.get(steps)).copied()
}

/// The calls of the last second.
#[derive(Debug)]
struct Recent {
    since: Instant,
    /// The number of the newest part, counted from `since`.
    newest: usize,
    /// Calls and failures, in a ring.
    parts: [(u32, u32); WINDOW],
}

impl Recent {
    fn since(since: Instant) -> Self {
        Self { since, newest: 0, parts: [(0, 0); WINDOW] }
    }

    fn count(&mut self, now: Instant, answered: bool) {
        let passed = now.saturating_duration_since(self.since).as_millis() / PART.as_millis();
        // Time does not run backwards; where two threads are late by a part, the newer one counts for both.
        let newest = usize::try_from(passed).unwrap_or(usize::MAX).max(self.newest);
        for part in (self.newest + 1..=newest).take(WINDOW) {
            self.parts[part % WINDOW] = (0, 0);
        }
        if newest - self.newest >= WINDOW {
            self.parts = [(0, 0); WINDOW];
        }
        self.newest = newest;
        let part = &mut self.parts[newest % WINDOW];
        part.0 = part.0.saturating_add(1);
        part.1 = part.1.saturating_add(u32::from(!answered));
    }

    fn is_bad(&self) -> bool {
        let (calls, failed) = self.parts.iter().fold((0_u32, 0_u32), |(calls, failed), part| {
            (calls.saturating_add(part.0), failed.saturating_add(part.1))
        });
        calls >= CALLS_MIN && failed.saturating_mul(ONE_IN) >= calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A breaker and the time, which the test moves.
    struct Bench {
        breaker: Breaker,
        now: Instant,
        changes: Vec<Phase>,
    }

    impl Bench {
        fn new() -> Self {
            let now = crate::clock::instant();
            Self { breaker: Breaker::new(now), now, changes: Vec::new() }
        }

        fn pass(&mut self, millis: u64) -> &mut Self {
            self.now += Duration::from_millis(millis);
            self.note();
            self
        }

        fn note(&mut self) {
            let phase = self.breaker.phase(self.now);
            if self.changes.last().map_or(phase != Phase::Healthy, |last| *last != phase) {
                self.changes.push(phase);
            }
        }

        /// A call for a caller of this draw, if it may be made.
        fn call(&mut self, draw: u8, answered: bool) -> bool {
            let admitted = self.breaker.admits(self.now, || draw);
            if admitted {
                self.breaker.record(self.now, answered);
            }
            self.note();
            admitted
        }

        fn calls(&mut self, count: u32, answered: bool) {
            for _ in 0..count {
                self.call(0, answered);
            }
        }

        /// Lets so much time pass; every probe that is due ends like this.
        fn probe_for(&mut self, millis: u64, answered: bool) -> u32 {
            let mut probes = 0;
            for _ in 0..millis {
                self.pass(1);
                if self.breaker.claim_probe(self.now, Duration::from_secs(1)) {
                    probes += 1;
                    self.breaker.probed(self.now, answered, 0.0);
                    self.note();
                }
            }
            probes
        }

        fn phase(&mut self) -> Phase {
            self.breaker.phase(self.now)
        }
    }

    #[test]
    fn five_failures_in_a_row_trip_it_and_four_do_not() {
        let mut bench = Bench::new();
        for _ in 0..100 {
            bench.calls(4, false);
            bench.pass(100);
            bench.calls(40, true);
        }
        assert_eq!(bench.phase(), Phase::Healthy);
        bench.calls(5, false);
        assert_eq!(bench.phase(), Phase::Tripped);
        assert!(!bench.call(0, true));
    }

    #[test]
    fn a_quarter_of_failures_trips_it_and_a_fifth_does_not() {
        // OUT-6: alive but slow never trips a breaker that looks at connections.
        for (every, phase) in [(5, Phase::Healthy), (4, Phase::Tripped)] {
            let mut bench = Bench::new();
            for call in 1..=200 {
                bench.pass(5);
                bench.call(0, call % every != 0);
            }
            assert_eq!(bench.phase(), phase, "every {every}th fails");
        }
    }

    #[test]
    fn few_calls_say_nothing_and_old_ones_are_forgotten() {
        let mut bench = Bench::new();
        for call in 0..200 {
            // Eight a second, half of them bad.
            bench.pass(125);
            bench.call(0, call % 2 == 0);
        }
        assert_eq!(bench.phase(), Phase::Healthy);
        bench.pass(3_600_000);
        bench.calls(1, true);
        assert_eq!(bench.phase(), Phase::Healthy);
    }

    #[test]
    fn a_store_that_is_back_is_healthy_within_a_second() {
        let mut bench = Bench::new();
        bench.calls(5, false);
        // Away for ten seconds: probed at 100 ms, then every 200 and 250.
        assert!((38..=42).contains(&bench.probe_for(10_000, false)));
        assert_eq!(bench.phase(), Phase::Tripped);
        bench.probe_for(990, true);
        assert_eq!(bench.phase(), Phase::Healthy);
        assert_eq!(bench.changes, [Phase::Tripped, Phase::Probing, Phase::Healthy]);
    }

    #[test]
    fn callers_return_a_part_at_a_time_and_none_goes_back_and_forth() {
        let mut bench = Bench::new();
        bench.calls(5, false);
        while bench.phase() == Phase::Tripped {
            bench.probe_for(1, true);
        }
        let mut returned = Vec::new();
        for _ in 0..4 {
            returned.push((0..100).filter(|&draw| bench.call(draw, true)).collect::<Vec<u8>>());
            bench.pass(200);
        }
        let sizes: Vec<usize> = returned.iter().map(Vec::len).collect();
        assert_eq!(sizes, [10, 30, 60, 100]);
        assert!(returned.windows(2).all(|pair| pair[1].starts_with(&pair[0])));
    }

    #[test]
    fn one_failure_behind_a_recovery_trips_nothing() {
        // OUT-4: one later error tripped it at once.
        let mut bench = Bench::new();
        bench.calls(5, false);
        bench.probe_for(2_000, true);
        assert_eq!(bench.phase(), Phase::Healthy);
        bench.calls(4, false);
        assert_eq!(bench.phase(), Phase::Healthy);
    }

    #[test]
    fn a_store_that_answers_probes_only_does_not_make_it_flap() {
        // F6: at most 6 transitions a minute, here under 1,000 calls a second that all fail.
        let mut bench = Bench::new();
        for _ in 0..60_000 {
            bench.probe_for(1, true);
            bench.call(0, false);
        }
        assert!(bench.changes.len() <= 6, "{:?}", bench.changes);
        // It is not given up on: a minute later it may try again.
        bench.probe_for(62_000, true);
        assert_eq!(bench.phase(), Phase::Healthy);
    }

    #[test]
    fn a_store_that_seldom_fails_returns_under_a_load() {
        // Three failures ended a return, of however many calls: at 5,000 a second one in a hundred did, which is nothing to a
        // healthy store, and it stayed away for as long as there was a load.
        let mut bench = Bench::new();
        bench.calls(5, false);
        for call in 0..10_000_u64 {
            if call % 5 == 0 {
                bench.probe_for(1, true);
            }
            bench.call(u8::try_from(call % 100).unwrap(), call * 7 % 101 != 0);
        }
        assert_eq!(bench.changes, [Phase::Tripped, Phase::Probing, Phase::Healthy]);
    }

    #[test]
    fn one_failure_on_the_way_is_a_doubt_until_the_next_answer() {
        // What a caller owes is written back when there is no doubt. After one failure there was doubt for the rest of the
        // return, and debtors were decided for without what they owed.
        let mut bench = Bench::new();
        bench.calls(5, false);
        while bench.phase() != Phase::Probing {
            bench.probe_for(1, true);
        }
        assert!(bench.breaker.is_beyond_doubt(bench.now));
        bench.call(0, false);
        assert!(!bench.breaker.is_beyond_doubt(bench.now));
        bench.call(0, true);
        assert!(bench.breaker.is_beyond_doubt(bench.now));
    }

    #[test]
    fn a_bad_return_is_forgotten_in_time() {
        let mut bench = Bench::new();
        bench.calls(5, false);
        while bench.phase() != Phase::Probing {
            bench.probe_for(1, true);
        }
        bench.calls(3, false);
        assert_eq!(bench.phase(), Phase::Tripped);
        bench.probe_for(4_000, true);
        assert_eq!(bench.phase(), Phase::Tripped, "it needs 50 answers now");
        bench.probe_for(3_000, true);
        assert_eq!(bench.phase(), Phase::Healthy);
        bench.pass(61_000);
        bench.calls(5, false);
        bench.probe_for(990, true);
        assert_eq!(bench.phase(), Phase::Healthy);
    }

    #[test]
    fn a_store_that_is_late_one_time_in_ten_is_believed_in_again() {
        // Fifty in a row are hardly ever answered by such a store, and six hundred never.
        for bad_returns in 1..=3 {
            let mut bench = Bench::new();
            bench.calls(5, false);
            for _ in 0..bad_returns {
                while bench.phase() != Phase::Probing {
                    bench.probe_for(1, true);
                }
                bench.calls(3, false);
            }
            let mut probes = 0;
            for _ in 0..150_000 {
                bench.pass(1);
                if bench.breaker.claim_probe(bench.now, Duration::from_secs(1)) {
                    probes += 1;
                    bench.breaker.probed(bench.now, probes % 10 != 0, 0.0);
                }
            }
            assert_eq!(bench.phase(), Phase::Healthy, "{bad_returns} bad returns, {probes} probes");
        }
    }

    #[test]
    fn only_one_of_many_probes_at_a_time() {
        let mut bench = Bench::new();
        bench.calls(5, false);
        assert!(bench.breaker.next_probe().is_some_and(|next| next > bench.now));
        assert!(!bench.breaker.claim_probe(bench.now, Duration::from_secs(1)));
        bench.pass(100);
        assert!(bench.breaker.claim_probe(bench.now, Duration::from_secs(1)));
        assert!(!bench.breaker.claim_probe(bench.now, Duration::from_secs(1)));
        // Whoever was to probe is gone: another one takes over.
        bench.pass(1_000);
        assert!(bench.breaker.claim_probe(bench.now, Duration::from_secs(1)));
        // What calls say that were under way when it tripped changes nothing.
        bench.breaker.record(bench.now, true);
        assert_eq!(bench.phase(), Phase::Tripped);
    }
}
