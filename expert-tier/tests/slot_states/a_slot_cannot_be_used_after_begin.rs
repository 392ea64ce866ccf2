use expert_tier::arena::{Free, Slot};
use expert_tier::record::RecordIdentity;

fn twice(slot: Slot<Free>, identity: RecordIdentity) {
    let first = slot.begin(identity);
    let second = slot.begin(identity);
    drop((first, second));
}

fn main() {}
