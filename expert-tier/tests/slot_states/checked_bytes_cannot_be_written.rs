use std::mem::MaybeUninit;

use expert_tier::arena::{Filling, Slot};

fn overwrite(slot: &mut Slot<Filling>) {
    let spare = slot.spare();
    slot.advance(1);
    spare[0] = MaybeUninit::new(0);
}

fn main() {}
