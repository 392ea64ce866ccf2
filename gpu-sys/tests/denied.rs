//! Pinned memory where a container's filter forbids a step of making it, or where a capability that
//! the process shows lifts nothing.

mod support;

use gpu_sys::limits::{IpcLock, LockLimit, memory_nodes};
use gpu_sys::pinned::{
    HugePages, NumaPlacement, PageKind, PinError, PinnedOptions, PinnedPages, Shortfall,
};
use support::{with_denied, with_user_namespace};

const BYTES: usize = 4 << 20;

fn options() -> PinnedOptions {
    PinnedOptions { bytes: BYTES, huge_pages: HugePages::Prefer, numa: NumaPlacement::Local }
}

/// Pins, looks at every page, and gives what the memory lacks.
fn pin() -> (PageKind, Vec<Shortfall>) {
    let mut pages = PinnedPages::new(&options()).expect("without what is forbidden");
    assert!(pages.bytes_mut().iter().all(|byte| *byte == 0));
    pages.bytes_mut().fill(7);
    (pages.page_kind(), pages.shortfalls().to_vec())
}

fn of(number: libc::c_long) -> String {
    number.to_string()
}

fn advice(advice: libc::c_int) -> String {
    format!("{}:2:{advice}", libc::SYS_madvise)
}

#[test]
fn where_mlock_is_forbidden_the_memory_is_not_locked_and_says_so() {
    let name = "where_mlock_is_forbidden_the_memory_is_not_locked_and_says_so";
    let calls = [of(libc::SYS_mlock), of(libc::SYS_mlock2), of(libc::SYS_munlock)];
    with_denied(name, "EPERM", &calls, || {
        let (_, lacks) = pin();
        assert_eq!(lacks, [Shortfall::Locked]);
        assert_eq!(LockLimit::current().locked_bytes, 0);
    });
}

#[test]
fn where_locking_and_advice_are_unknown_every_page_is_there_all_the_same() {
    let name = "where_locking_and_advice_are_unknown_every_page_is_there_all_the_same";
    let calls = [of(libc::SYS_mlock), of(libc::SYS_madvise)];
    with_denied(name, "ENOSYS", &calls, || {
        let (kind, lacks) = pin();
        assert_eq!(kind, PageKind::Ordinary);
        let all = [
            Shortfall::TransparentHugePages,
            Shortfall::KeptOutOfForks,
            Shortfall::KeptOutOfDumps,
            Shortfall::Locked,
        ];
        assert_eq!(lacks, all);
    });
}

#[test]
fn where_huge_pages_may_not_be_asked_for_the_pages_are_ordinary() {
    let name = "where_huge_pages_may_not_be_asked_for_the_pages_are_ordinary";
    with_denied(name, "EINVAL", &[advice(libc::MADV_HUGEPAGE)], || {
        assert_eq!(pin(), (PageKind::Ordinary, vec![Shortfall::TransparentHugePages]));
    });
}

#[test]
fn where_advice_of_forks_and_dumps_is_forbidden_the_memory_is_pinned_without() {
    let name = "where_advice_of_forks_and_dumps_is_forbidden_the_memory_is_pinned_without";
    let calls = [advice(libc::MADV_DONTFORK), advice(libc::MADV_DONTDUMP)];
    with_denied(name, "EPERM", &calls, || {
        let (_, lacks) = pin();
        assert_eq!(lacks, [Shortfall::KeptOutOfForks, Shortfall::KeptOutOfDumps]);
    });
}

#[test]
fn a_memory_node_that_may_not_be_chosen_is_an_error_with_the_knob() {
    let name = "a_memory_node_that_may_not_be_chosen_is_an_error_with_the_knob";
    let node = *memory_nodes().first().expect("a node has memory");
    for errno in ["EPERM", "ENOSYS"] {
        with_denied(name, errno, &[of(libc::SYS_mbind)], || {
            let numa = NumaPlacement::Node(node);
            let error = PinnedPages::new(&PinnedOptions { numa, ..options() }).unwrap_err();
            assert!(matches!(error, PinError::Bind { .. }), "{error}");
            let text = error.to_string();
            for part in ["mbind failed", "--expert-numa-node", "seccomp"] {
                assert!(text.contains(part), "{part:?} is not in {text}");
            }
            // Nobody has asked for a node here.
            assert_eq!(pin().1, []);
        });
    }
}

#[test]
fn a_capability_of_another_user_namespace_leaves_the_limit_as_it_is() {
    let name = "a_capability_of_another_user_namespace_leaves_the_limit_as_it_is";
    with_user_namespace(name, 3 << 20, || {
        let limit = LockLimit::current();
        assert_eq!(limit.capability, IpcLock::InNamespace);
        assert!(limit.allows(3 << 20) && !limit.allows((3 << 20) + 1));
        let error = PinnedPages::new(&options()).unwrap_err();
        assert!(matches!(error, PinError::LockLimit { .. }) && error.is_of_size(), "{error}");
        let text = error.to_string();
        assert!(text.contains("the limit is 3 MiB, which CAP_IPC_LOCK does not lift"), "{text}");
        // Not rounded up to whole huge pages where only ordinary ones fit.
        let odd = PinnedOptions { bytes: (2 << 20) + 4096, ..options() };
        assert_eq!(PinnedPages::new(&odd).expect("what the limit allows").len(), odd.bytes);
    });
}
