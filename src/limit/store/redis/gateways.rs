//! How many gateways count in this Redis, so that each knows its share of the limits when it has to count alone.

use std::rc::{Rc, Weak};
use std::time::Duration;

use super::super::StoreError;
use super::super::guard::within;
use super::node::{Call, Kit};
use super::nodes::Nodes;
use crate::clock;

/// How often a gateway says that it lives.
const EVERY: Duration = Duration::from_secs(2);

/// How long it counts when it says nothing more.
const COUNTS_FOR: Duration = Duration::from_secs(7);

/// How long saying it may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// The part of the key between the braces. No caller has such an id.
const TAG: &str = "gateways";

/// Says that this process lives, and hears how many do, for as long as the store is used. All workers do it in turns: whoever
/// comes when it is due.
pub(super) async fn keep_counting(kit: Weak<Kit>, nodes: Weak<Nodes>) {
    loop {
        let Some((kit, nodes)) = kit.upgrade().zip(nodes.upgrade()) else { return };
        if kit.common.claims_count(clock::instant(), EVERY) {
            let counted = within(Some(clock::instant() + PATIENCE), count(&kit, &nodes)).await;
            if let Ok(gateways) = counted {
                kit.common.local().hear_gateways(gateways, clock::instant());
            }
        }
        drop((kit, nodes));
        tokio::time::sleep(EVERY / 2).await;
    }
}

async fn count(kit: &Rc<Kit>, nodes: &Rc<Nodes>) -> Result<u64, StoreError> {
    let script = kit.scripts.counting();
    let mut call = script.by_hash();
    call.arg(1).arg(kit.calls.gateways(TAG)).arg(kit.common.id()).arg(clock::micros(COUNTS_FOR));
    let answer = nodes.send(nodes.hash_slot(TAG), &Call::Script(Rc::clone(script), call)).await?;
    let number: u64 =
        ::redis::from_redis_value(answer).map_err(|_| StoreError::Nonsense("not a number of gateways"))?;
    Ok(number.max(1))
}
