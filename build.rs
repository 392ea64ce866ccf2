//! Decides for every crate of the workspace whether verbs are compiled in: sets
//! `cfg(metrale_rdma_verbs)` on Linux, unless `METRALE_NO_VERBS=1` says no. Nothing has to be
//! installed for it: libibverbs is looked for when the program runs.
//!
//! Members refer to this file as `build = "../build.rs"`.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(metrale_rdma_verbs)");
    println!("cargo::rerun-if-env-changed=METRALE_NO_VERBS");
    let linux = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|name| name == "linux");
    let refused = std::env::var_os("METRALE_NO_VERBS").is_some_and(|value| value == "1");
    if linux && !refused {
        println!("cargo::rustc-cfg=metrale_rdma_verbs");
    }
}
