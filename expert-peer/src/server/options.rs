//! Settings of a peer.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use expert_tier::wire::Secret;

#[cfg(metrale_rdma_verbs)]
use crate::push::PushOptions;
#[cfg(metrale_rdma_verbs)]
use crate::rails::RailsWish;
#[cfg(metrale_rdma_verbs)]
use crate::residency::ResidencyOptions;

/// Settings of a peer.
#[derive(Clone, Debug)]
pub struct PeerOptions {
    /// The store to publish.
    pub store: PathBuf,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// What clients must know.
    pub secret: Option<Secret>,
    /// Whether to listen beyond loopback without a secret.
    pub exposure: Exposure,
    /// Most clients at once.
    pub max_clients: u32,
    /// Longest time for a client's whole handshake.
    pub handshake: Duration,
    /// Longest time in which a client must take some bytes of an answer.
    pub stall: Duration,
    /// Longest time to finish answers when shutting down.
    pub drain: Duration,
    /// Which rails to serve.
    #[cfg(metrale_rdma_verbs)]
    pub rails: RailsWish,
    /// Whether a peer that can serve no rail does not start.
    #[cfg(metrale_rdma_verbs)]
    pub require_rails: bool,
    /// From one look at the RDMA devices to the next.
    #[cfg(metrale_rdma_verbs)]
    pub survey: Duration,
    /// Most bytes of memory for the records that clients READ; `None` for as much as they need and
    /// the machine has.
    #[cfg(metrale_rdma_verbs)]
    pub dram_budget: Option<u64>,
    /// How the other records are sent.
    #[cfg(metrale_rdma_verbs)]
    pub push: PushOptions,
    /// File that says which records were fetched most, to start with.
    #[cfg(metrale_rdma_verbs)]
    pub resident_profile: Option<PathBuf>,
    /// How records move between disk and memory.
    #[cfg(metrale_rdma_verbs)]
    pub residency: ResidencyOptions,
}

/// Whether a peer may be reached by others without proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exposure {
    /// Without a secret, only loopback addresses are listened on.
    SecretOrLoopback,
    /// The operator said `--insecure`.
    Insecure,
}

impl PeerOptions {
    /// The defaults for a store.
    #[must_use]
    pub fn new(store: PathBuf) -> Self {
        Self {
            store,
            listen: SocketAddr::from(([127, 0, 0, 1], 9909)),
            secret: None,
            exposure: Exposure::SecretOrLoopback,
            max_clients: 64,
            handshake: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            drain: Duration::from_secs(10),
            #[cfg(metrale_rdma_verbs)]
            rails: RailsWish::default(),
            #[cfg(metrale_rdma_verbs)]
            require_rails: false,
            #[cfg(metrale_rdma_verbs)]
            survey: Duration::from_secs(1),
            #[cfg(metrale_rdma_verbs)]
            dram_budget: None,
            #[cfg(metrale_rdma_verbs)]
            push: PushOptions::default(),
            #[cfg(metrale_rdma_verbs)]
            resident_profile: None,
            #[cfg(metrale_rdma_verbs)]
            residency: ResidencyOptions::default(),
        }
    }
}
