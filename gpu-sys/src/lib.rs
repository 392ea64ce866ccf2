//! The one crate that talks to the kernel and to drivers in their own terms.
//!
//! Everything above it sees owners with a `Drop` and errors that name the setting to change:
//! pinned pages ([`pinned`]), the limits that decide whether they can be had ([`limits`]), CUDA
//! ([`cuda`]), and RDMA verbs (`verbs`, where they are compiled in).

pub mod cuda;
pub mod env;
pub mod limits;
pub mod pinned;
pub mod slots;
pub mod sockets;
pub mod usage;
#[cfg(metrale_rdma_verbs)]
pub mod verbs;
