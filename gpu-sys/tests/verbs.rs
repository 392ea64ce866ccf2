//! What holds for verbs without a device: misuse that does not compile, and a machine without
//! libibverbs.
#![cfg(metrale_rdma_verbs)]

mod support;

#[test]
fn misuse_of_verbs_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/verbs_states/*.rs");
}

/// With the crate rdma-sys the library is linked, and a program does not start without it.
#[cfg(not(feature = "rdma-sys"))]
#[test]
fn a_machine_without_libibverbs_is_told_what_to_install() {
    use gpu_sys::verbs::{Library, VerbsError};

    let name = "a_machine_without_libibverbs_is_told_what_to_install";
    support::with_garbage(name, "libibverbs.so.1", || {
        let error = Library::open().unwrap_err();
        assert!(matches!(error, VerbsError::NoLibrary { .. }), "{error}");
        let text = error.to_string();
        for part in [
            "libibverbs.so.1 cannot be opened",
            "rdma-core",
            "libibverbs1",
            "--expert-backend rdma",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(!error.is_transient());
    });
}
