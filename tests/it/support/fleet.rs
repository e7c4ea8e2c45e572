//! Several configurations on the same counters: one after the other, as restarts and reloads make them, or at the same
//! time, as a rolling deployment does.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::rt::{System, SystemRunner};
use actix_web::{App, test, web};
use tollgate::clock::{Clock as _, ManualClock};
use tollgate::config::{self, Purpose, Sources};
use tollgate::gate::Gate;
use tollgate::limit::store::{MemoryStore, StoreKind};
use tollgate::observe::Metrics;
use tollgate::plan::Policy;

use super::backend::Backend;
use super::client::{Answer, Request};
use super::config::Config;
use super::gateway::Gateway;
use super::redis::Redis;
use super::store::Store;
use super::wire::{Ending, Head};

/// 18 March 2026, noon in UTC: no boundary of a day, a week or a month is near.
const NOON: u64 = 1_773_835_200_000_000;

/// The counters, and what asks them.
pub(crate) enum Fleet {
    /// Gates of the library in this process. They share one memory, on a clock that the test moves.
    Gates {
        /// The counters.
        memory: Arc<MemoryStore>,
        /// Their clock.
        clock: Arc<ManualClock>,
        /// What runs the gates.
        runtime: Rc<SystemRunner>,
    },
    /// Gateways on one Redis.
    Gateways {
        /// The counters.
        store: Store,
        /// Where the gateways lead.
        backend: Backend,
    },
}

impl Fleet {
    /// Gates on one memory.
    pub(crate) fn of_gates() -> Self {
        let clock = Arc::new(ManualClock::at(NOON));
        let memory = Arc::new(MemoryStore::new(100, clock.clone()));
        Self::Gates { memory, clock, runtime: Rc::new(System::new()) }
    }

    /// Gateways on one Redis.
    pub(crate) fn of_gateways() -> Self {
        Self::Gateways { store: Store::Redis(Redis::start()), backend: Backend::ok() }
    }

    /// Puts a configuration in force, besides those that are: drop a [`Member`] to end it.
    #[track_caller]
    pub(crate) fn start(&self, config: &Config) -> Member {
        let answering = match self {
            Self::Gates { memory, runtime, .. } => {
                let config = config.clone().upstream("127.0.0.1:9".parse().unwrap());
                Answering::Gate(gate(&config, Arc::clone(memory), Rc::clone(runtime)))
            }
            Self::Gateways { store, backend } => {
                Answering::Gateway(Gateway::start(&config.clone().upstream(backend.address()).store(store)))
            }
        };
        Member { answering }
    }

    /// The time by the clock that counts, since some moment of the past.
    pub(crate) fn now(&self) -> Duration {
        match self {
            Self::Gates { clock, .. } => Duration::from_micros(clock.now()),
            Self::Gateways { .. } => SystemTime::UNIX_EPOCH.elapsed().unwrap(),
        }
    }

    /// Lets time pass, in truth or for the gates.
    pub(crate) fn wait(&self, span: Duration) {
        match self {
            Self::Gates { clock, .. } => clock.advance(span),
            Self::Gateways { .. } => std::thread::sleep(span),
        }
    }
}

type AskGate = Box<dyn Fn(&str, &str) -> Answer>;

enum Answering {
    Gate(AskGate),
    Gateway(Gateway),
}

/// One configuration in force.
pub(crate) struct Member {
    answering: Answering,
}

impl Member {
    /// One call with this key.
    #[track_caller]
    pub(crate) fn call(&self, key: &str) -> Answer {
        self.call_to("/x", key)
    }

    /// One call of this path with this key.
    #[track_caller]
    pub(crate) fn call_to(&self, path: &str, key: &str) -> Answer {
        match &self.answering {
            Answering::Gate(ask) => ask(path, key),
            Answering::Gateway(gateway) => Request::get(path).key(key).on(&mut gateway.connect()),
        }
    }

    /// So many calls pass; the answer to the last one.
    #[track_caller]
    pub(crate) fn passes(&self, calls: usize, key: &str) -> Answer {
        let mut last = None;
        for _ in 0..calls {
            last = Some(self.call(key).expect(200));
        }
        last.expect("at least one call")
    }

    /// The next call is refused.
    #[track_caller]
    pub(crate) fn refuses(&self, key: &str) -> Answer {
        self.call(key).expect(429)
    }

    /// So many calls pass and not one more; the refusal.
    #[track_caller]
    pub(crate) fn exactly(&self, calls: usize, key: &str) -> Answer {
        for call in 0..calls {
            let answer = self.call(key);
            assert_eq!(answer.status, 200, "call {call} of {calls} with {key}: {:#?}", answer.head);
        }
        self.refuses(key)
    }
}

/// A gate of the library in front of a handler that says `ok`.
#[track_caller]
fn gate(config: &Config, memory: Arc<MemoryStore>, runtime: Rc<SystemRunner>) -> AskGate {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.toml");
    std::fs::write(&file, config.text()).unwrap();
    let sources = Sources { files: vec![file], environment: Vec::new(), purpose: Purpose::Gateway };
    let settings = config::load(&sources).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let policy = Policy::new(settings.policy).unwrap();
    let gate = Gate::new(policy, StoreKind::Memory, memory, Arc::new(Metrics::new().unwrap()));
    let app = App::new().wrap(gate).default_service(web::to(async || "ok"));
    let service = runtime.block_on(test::init_service(app));
    Box::new(move |path, key| {
        let request = test::TestRequest::get().uri(path).insert_header(("host", "api.example.test"));
        let request = request.insert_header(("x-api-key", key)).peer_addr("127.0.0.1:9".parse().unwrap());
        runtime.block_on(async { answer_of(test::call_service(&service, request.to_request()).await).await })
    })
}

/// What the client would have seen.
async fn answer_of<B>(response: ServiceResponse<B>) -> Answer
where
    B: MessageBody + 'static,
{
    let response: ServiceResponse<BoxBody> = response.map_into_boxed_body();
    let status = response.status();
    let fields = response.headers().iter();
    let fields = fields.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
    let head = Head { first_line: format!("HTTP/1.1 {status}"), fields };
    let body = test::read_body(response).await.to_vec();
    Answer { status: status.as_u16(), head, body, ending: Ending::Complete }
}

/// Runs one story about changes on gates that share a memory, and on gateways that share a Redis.
///
/// `fn name(fleet) { .. }` becomes the tests `name::memory` and `name::redis`; `fleet` is a `&Fleet`.
macro_rules! for_every_fleet {
    ($($(#[$attribute:meta])* fn $name:ident($fleet:ident) $body:block)+) => {
        $(
            mod $name {
                use crate::support::Fleet;

                #[test]
                $(#[$attribute])*
                fn memory() {
                    super::$name(&Fleet::of_gates());
                }

                #[test]
                $(#[$attribute])*
                fn redis() {
                    super::$name(&Fleet::of_gateways());
                }
            }

            fn $name($fleet: &crate::support::Fleet) $body
        )+
    };
}

pub(crate) use for_every_fleet;
