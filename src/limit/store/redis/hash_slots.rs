//! Which node of a cluster keeps which hash slot. Pure: what `CLUSTER SLOTS` answers goes in.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::Value;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::limit::store::shard::COMPLAIN_EVERY;

/// Slots of a cluster (Redis Cluster specification, "Key distribution model").
pub(super) const HASH_SLOTS: u16 = 16_384;

/// The hash slot of all keys of this caller: its id stands in the braces of each, and cannot hold one.
pub(super) fn hash_slot_of(caller: &str) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(caller.as_bytes()) % HASH_SLOTS
}

/// Who keeps which hash slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// `host:port` of every node that keeps hash slots.
    addresses: Vec<Box<str>>,
    /// By hash slot: the index of its node and one; 0 where nobody keeps it. Empty before anything is known.
    owners: Vec<u16>,
}

impl SlotMap {
    /// From the answer to `CLUSTER SLOTS` of the node at `asked`, which stands in for a host that is not named; `None` when it
    /// makes no sense.
    pub(super) fn read(answer: &Value, asked: &str) -> Option<Self> {
        let Value::Array(ranges) = answer else { return None };
        let mut map = Self { addresses: Vec::new(), owners: vec![0; usize::from(HASH_SLOTS)] };
        for range in ranges {
            // The first slot, the last one, the primary, its replicas.
            let Value::Array(fields) = range else { return None };
            let [Value::Int(from), Value::Int(to), Value::Array(primary), ..] = fields.as_slice() else {
                return None;
            };
            let (from, to) = (usize::try_from(*from).ok()?, usize::try_from(*to).ok()?);
            let address = address(primary, asked)?;
            let index = map.index_of(&address)?;
            map.owners.get_mut(from..=to)?.fill(index + 1);
        }
        (!ranges.is_empty()).then_some(map)
    }

    /// Whether anything is known.
    pub(super) fn is_known(&self) -> bool {
        !self.owners.is_empty()
    }

    /// The index of the node that keeps `hash_slot`; `None` if nobody does.
    pub(super) fn owner(&self, hash_slot: u16) -> Option<usize> {
        let owner = self.owners.get(usize::from(hash_slot))?;
        owner.checked_sub(1).map(usize::from)
    }

    /// Every node that keeps hash slots, by index.
    pub(super) fn addresses(&self) -> &[Box<str>] {
        &self.addresses
    }

    /// The same map, but this hash slot is kept there.
    fn moved(&self, hash_slot: u16, address: &str) -> Option<Self> {
        let mut map = self.clone();
        let index = map.index_of(address)?;
        *map.owners.get_mut(usize::from(hash_slot))? = index + 1;
        Some(map)
    }

    fn index_of(&mut self, address: &str) -> Option<u16> {
        let index = self.addresses.iter().position(|known| **known == *address).unwrap_or_else(|| {
            self.addresses.push(address.into());
            self.addresses.len() - 1
        });
        u16::try_from(index).ok().filter(|index| *index < HASH_SLOTS)
    }
}

/// `host:port` of a node in an answer.
fn address(node: &[Value], asked: &str) -> Option<Box<str>> {
    let [host, Value::Int(port), ..] = node else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        // A node that does not know its own name is the one that answered.
        Value::Nil => "",
        _ => return None,
    };
    let host = if host.is_empty() { split(asked)?.0 } else { host };
    Some(format!("{host}:{port}").into())
}

/// Host and port of an address as nodes write it, where an IPv6 address has no brackets.
pub(super) fn split(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    Some((host, port.parse().ok()?))
}

/// The map that all workers share, and who is to bring it up to date.
#[derive(Debug)]
pub(in crate::limit) struct SharedMap {
    map: watch::Sender<Arc<SlotMap>>,
    reading: Mutex<Reading>,
}

#[derive(Debug, Default)]
struct Reading {
    /// When it was first tried to read the map.
    began: Option<Instant>,
    /// Nobody else reads before.
    claimed_until: Option<Instant>,
    /// When it was last said that nobody tells the map.
    complained: Option<Instant>,
}

impl Default for SharedMap {
    fn default() -> Self {
        Self { map: watch::Sender::new(Arc::default()), reading: Mutex::default() }
    }
}

impl SharedMap {
    /// The map as it is known now.
    pub(super) fn now(&self) -> Arc<SlotMap> {
        Arc::clone(&self.map.borrow())
    }

    /// The map, and every change of it.
    pub(super) fn watch(&self) -> watch::Receiver<Arc<SlotMap>> {
        self.map.subscribe()
    }

    /// The whole map was read.
    pub(super) fn replace(&self, map: SlotMap) {
        self.map.send_if_modified(|known| {
            let differs = **known != map;
            if differs {
                *known = Arc::new(map);
            }
            differs
        });
    }

    /// A node says that this hash slot is kept there.
    pub(super) fn moved(&self, hash_slot: u16, address: &str) {
        self.map.send_if_modified(|known| match known.moved(hash_slot, address) {
            Some(map) if map != **known => {
                *known = Arc::new(map);
                true
            }
            _ => false,
        });
    }

    /// Whether whoever asks is to read the map now. Nobody else is told so before `patience` has passed, or it is
    /// [done](Self::read).
    pub(super) fn claim(&self, now: Instant, patience: Duration) -> bool {
        let mut reading = self.reading.lock();
        if reading.claimed_until.is_some_and(|until| now < until) {
            return false;
        }
        reading.began.get_or_insert(now);
        reading.claimed_until = Some(now + patience);
        true
    }

    /// Reading has ended; the next one may come after `pause`.
    pub(super) fn read(&self, now: Instant, pause: Duration) {
        self.reading.lock().claimed_until = Some(now + pause);
    }

    /// Whether it is time to say that nobody tells the map. Whoever asks is to say it.
    pub(super) fn may_complain(&self, now: Instant) -> bool {
        let last = &mut self.reading.lock().complained;
        let is_time = last.is_none_or(|last| now.duration_since(last) >= COMPLAIN_EVERY);
        if is_time {
            *last = Some(now);
        }
        is_time
    }

    /// Whether the first attempt to read the map is older than `patience`.
    pub(super) fn is_late(&self, now: Instant, patience: Duration) -> bool {
        self.reading.lock().began.is_some_and(|began| now.duration_since(began) > patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: i64) -> Value {
        Value::Array(vec![Value::BulkString(host.into()), Value::Int(port), Value::BulkString("id".into())])
    }

    fn range(from: i64, to: i64, primary: Value) -> Value {
        Value::Array(vec![Value::Int(from), Value::Int(to), primary, node("10.0.0.9", 1)])
    }

    #[test]
    fn the_slot_is_the_one_that_redis_computes() {
        // CLUSTER KEYSLOT of Redis 7.0.15.
        assert_eq!((hash_slot_of("123456789"), hash_slot_of("foo"), hash_slot_of("")), (12_739, 12_182, 0));
    }

    #[test]
    fn a_map_names_the_primary_of_every_slot() {
        let answer = Value::Array(vec![
            range(0, 5_460, node("10.0.0.1", 7_000)),
            range(5_461, 16_382, node("", 7_001)),
            range(16_383, 16_383, node("10.0.0.1", 7_000)),
        ]);
        let map = SlotMap::read(&answer, "10.0.0.2:7009").unwrap();
        let owner =
            |map: &SlotMap, hash_slot| map.owner(hash_slot).map(|index| map.addresses()[index].clone());
        assert_eq!(owner(&map, 0).as_deref(), Some("10.0.0.1:7000"));
        assert_eq!(owner(&map, 5_461).as_deref(), Some("10.0.0.2:7001"));
        assert_eq!(owner(&map, 16_383).as_deref(), Some("10.0.0.1:7000"));
        let map = map.moved(5_461, "::1:7002").unwrap();
        assert_eq!(owner(&map, 5_461).as_deref(), Some("::1:7002"));
        assert_eq!(split("::1:7002"), Some(("::1", 7_002)));
    }

    #[test]
    fn slots_that_nobody_keeps_have_no_owner() {
        let answer = Value::Array(vec![range(0, 10, node("10.0.0.1", 7_000))]);
        let map = SlotMap::read(&answer, "10.0.0.1:7000").unwrap();
        assert!(map.is_known());
        assert_eq!((map.owner(10), map.owner(11), SlotMap::default().owner(0)), (Some(0), None, None));
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_no_map() {
        let primary = || node("10.0.0.1", 7_000);
        for answer in [
            Value::Nil,
            Value::Array(Vec::new()),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 16_384, primary())]),
            Value::Array(vec![range(-1, 5, primary())]),
            Value::Array(vec![range(7, 5, primary())]),
            Value::Array(vec![range(0, 5, Value::Nil)]),
            Value::Array(vec![range(0, 5, Value::Array(vec![Value::Int(1), Value::Int(1)]))]),
        ] {
            assert_eq!(SlotMap::read(&answer, "10.0.0.1:7000"), None, "{answer:?}");
        }
    }

    #[test]
    fn one_at_a_time_reads_the_map() {
        let shared = SharedMap::default();
        let (now, second) = (crate::clock::instant(), Duration::from_secs(1));
        assert!(!shared.is_late(now, Duration::ZERO));
        assert!(shared.claim(now, second) && !shared.claim(now, second));
        assert!(shared.claim(now + second, second), "the first reader is gone");
        shared.read(now + second, second * 2);
        assert!(!shared.claim(now + second * 2, second) && shared.claim(now + second * 3, second));
        assert!(shared.is_late(now + second, Duration::from_millis(999)));
    }
}
