//! What it costs to let a peer write to memory, and to end that: medians of registering and of
//! deregistering so many bytes for remote writing, on the device that is named.
//!
//! `cargo run --release -p gpu-sys --example grant_cost -- rxe0`

#[cfg(metrale_rdma_verbs)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::sync::Arc;
    use std::time::Instant;

    use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions, PinnedPages};
    use gpu_sys::verbs::{Access, Library, Memory, MemoryRegion, ProtectionDomain};

    const ROUNDS: usize = 200;
    let device = std::env::args().nth(1).ok_or("name a device, as ibv_devices does")?;
    let domain = ProtectionDomain::new(&Library::open()?.open_device(&device)?)?;
    println!("{:>9}  {:>9}  {:>11}", "bytes", "grant, us", "revoke, us");
    for bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20] {
        let (huge_pages, numa) = (HugePages::Prefer, NumaPlacement::Local);
        let pages = Arc::new(PinnedPages::new(&PinnedOptions { bytes, huge_pages, numa })?);
        let (mut grants, mut revokes) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let memory: Arc<dyn Memory> = Arc::clone(&pages) as Arc<dyn Memory>;
            let before = Instant::now();
            let grant = MemoryRegion::register(&domain, memory, 0..bytes, Access::RemoteWrite)?;
            let between = Instant::now();
            grant.deregister().map_err(|refused| refused.source)?;
            grants.push(between - before);
            revokes.push(between.elapsed());
        }
        let median = |times: &mut Vec<std::time::Duration>| {
            times.sort();
            times[ROUNDS / 2].as_secs_f64() * 1e6
        };
        println!("{bytes:>9}  {:>9.1}  {:>11.1}", median(&mut grants), median(&mut revokes));
    }
    Ok(())
}

#[cfg(not(metrale_rdma_verbs))]
fn main() {
    println!("this build has no verbs");
}
