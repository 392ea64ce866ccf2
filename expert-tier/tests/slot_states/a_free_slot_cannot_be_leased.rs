use std::sync::Arc;

use expert_tier::arena::{Free, Slot};
use expert_tier::residency::ExpertResidency;
use expert_tier::store::manifest::Manifest;

fn lease(slot: Slot<Free>, manifest: &Arc<Manifest>) -> ExpertResidency {
    slot.into_residency(manifest)
}

fn main() {}
