//! One client's queue pairs: made in its handshake, gone with its connection.

use std::sync::Arc;

use gpu_sys::verbs::{CompletionQueue, QueuePair, QueuePairOptions, RemoteAccess, VerbsError};
use railset::driver;
use railset::handshake::HandshakeError;
use railset::handshake::peer::{CreateConnected, PeerAction, PeerHandshake};
use railset::message::{Kind, Psn, Qpn, QueuePairEnd};
use railset::wire::DecodeError;
use rand::Rng;

use super::Published;

/// Why a client's rails end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientEnd {
    /// The client broke the protocol, or wants what it may not have.
    #[error("{0}")]
    Agree(#[from] HandshakeError),
    /// The device refuses.
    #[error("{0}")]
    Verbs(#[from] VerbsError),
    /// The device gave a queue pair a number that none can have.
    #[error("a device made a queue pair that cannot be: {0}")]
    QueuePair(#[from] DecodeError),
}

/// The rails of one connection.
pub(crate) struct RailClient {
    published: Arc<Published>,
    machine: PeerHandshake,
    /// Nothing is ever posted on them; dropping them ends the client's access.
    pairs: Vec<QueuePair<()>>,
}

impl RailClient {
    pub(crate) fn new(published: &Arc<Published>) -> Self {
        let machine = PeerHandshake::new(Arc::clone(&published.rails));
        Self { published: Arc::clone(published), machine, pairs: Vec::new() }
    }

    /// Queue pairs of this client.
    pub(crate) fn queue_pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Takes a message, and gives those that answer it.
    pub(crate) fn on_message(
        &mut self,
        kind: Kind,
        body: &[u8],
    ) -> Result<Vec<(Kind, Vec<u8>)>, ClientEnd> {
        let mut answers = Vec::new();
        for action in self.machine.on_message(kind, body)? {
            match action {
                PeerAction::Send(kind, body) => answers.push((kind, body)),
                PeerAction::CreateQueuePairs(creates) => {
                    let ends: Result<Vec<_>, ClientEnd> =
                        creates.iter().map(|create| self.create(create)).collect();
                    for action in self.machine.on_created(&ends?, &self.published.table)? {
                        if let PeerAction::Send(kind, body) = action {
                            answers.push((kind, body));
                        }
                    }
                }
                PeerAction::Acknowledged(generation) => {
                    tracing::debug!(generation, "a client uses the table");
                }
                PeerAction::Usage(_) | PeerAction::Damaged(_) => {}
            }
        }
        Ok(answers)
    }

    fn create(&mut self, create: &CreateConnected) -> Result<Vec<QueuePairEnd>, ClientEnd> {
        let CreateConnected { local, bring_up, .. } = create;
        let domain = &self.published.domains[usize::from(bring_up.index)];
        // Nothing is posted, but a queue pair without a place for one request cannot be made.
        let count = bring_up.remote.len() as u32;
        let queue = CompletionQueue::new(domain.context(), count)?;
        let options = QueuePairOptions {
            port: local.port,
            send_wr: 1,
            recv_wr: 0,
            recv_bytes: 0,
            inline_bytes: 0,
            remote_access: RemoteAccess::Read,
        };
        let mut ends = Vec::with_capacity(bring_up.remote.len());
        for &remote in &bring_up.remote {
            let prepared = QueuePair::prepare(domain, &queue, &queue, options)?;
            let psn = Psn::from_random(rand::rng().next_u32());
            ends.push(QueuePairEnd { qpn: Qpn::new(prepared.number())?, psn });
            let (remote, local) = driver::ends(bring_up, local, remote, psn);
            self.pairs.push(prepared.connect(&remote, &local).map_err(|error| error.source)?);
        }
        Ok(ends)
    }
}
