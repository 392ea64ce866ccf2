//! What pinned pages are on a system that forbids nothing.

use super::*;

fn options(bytes: usize) -> PinnedOptions {
    PinnedOptions { bytes, huge_pages: HugePages::Prefer, numa: NumaPlacement::Local }
}

#[test]
fn pinned_pages_are_zeroed_aligned_and_rounded_up() {
    let pages = PinnedPages::new(&options(10_000)).unwrap();
    let page = rustix::param::page_size();
    assert_eq!(pages.len() % page, 0);
    assert!(pages.len() >= 10_000);
    assert_eq!(pages.address().as_ptr() as usize % page, 0);
    // SAFETY: the mapping is alive, has at least 10,000 initialised bytes, and nothing else
    // refers to it.
    let bytes = unsafe { std::slice::from_raw_parts(pages.address().as_ptr(), 10_000) };
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn no_bytes_and_too_many_bytes_are_refused() {
    for bytes in [0, usize::MAX, isize::MAX as usize] {
        assert!(matches!(PinnedPages::new(&options(bytes)), Err(PinError::Size { .. })));
    }
}

#[test]
fn more_than_the_machine_has_is_refused_before_it_is_touched() {
    let available = limits::available_memory().expect("/proc/meminfo is there");
    let wanted = usize::try_from(available.bytes).unwrap() + (1 << 30);
    let error = PinnedPages::new(&options(wanted)).unwrap_err();
    assert!(matches!(error, PinError::NotEnoughMemory { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("--expert-arena-bytes"), "{text}");
    assert!(text.contains("GiB"), "{text}");
}

#[test]
fn a_node_that_is_not_there_is_named_with_those_that_are() {
    let numa = NumaPlacement::Node(4711);
    let error = PinnedPages::new(&PinnedOptions { numa, ..options(4096) }).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("4711") && text.contains("choose one of"), "{text}");
}

#[test]
fn memory_can_be_bound_to_a_node() {
    let nodes = limits::memory_nodes();
    let node = *nodes.first().expect("/sys/devices/system/node lists one node at least");
    let numa = NumaPlacement::Node(node);
    let pages = PinnedPages::new(&PinnedOptions { numa, ..options(4096) }).unwrap();
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    let start = format!("{:x}", pages.address().as_ptr() as usize);
    let line = maps.lines().find(|line| line.starts_with(&start)).expect("its own mapping");
    assert!(line.contains(&format!("bind:{node}")), "{line}");
    assert!(line.contains(&format!("N{node}=1")), "present on its node: {line}");
}

#[test]
fn pinned_pages_are_locked_and_out_of_forks_and_dumps() {
    let pages = PinnedPages::new(&options(64 << 10)).unwrap();
    let flags = vm_flags(pages.address().as_ptr() as usize).expect("its own mapping");
    for flag in ["lo", "dc", "dd"] {
        assert!(flags.iter().any(|f| f == flag), "{flag} is not in {flags:?}");
    }
}

/// `VmFlags` of the mapping at `address` in `/proc/self/smaps`: lo locked, dc don't copy on
/// fork, dd don't dump.
fn vm_flags(address: usize) -> Option<Vec<String>> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{address:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"))?;
    Some(flags.split_whitespace().map(str::to_owned).collect())
}
