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
use crate::residency::live::Seat;

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
    /// Among those that are waited for before slots are overwritten; given up after the queue pairs.
    seat: Option<Seat>,
    /// Generation of the newest table that was sent.
    sent: u64,
}

impl RailClient {
    pub(crate) fn new(published: &Arc<Published>) -> Self {
        let generation = published.residency.live().generation();
        let rails = Arc::new(published.rails.with_generation(generation));
        let machine = PeerHandshake::new(rails);
        Self { published: Arc::clone(published), machine, pairs: Vec::new(), seat: None, sent: 0 }
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
                    let live = self.published.residency.live();
                    self.seat = Some(live.enter());
                    let table = live.table();
                    self.sent = table.generation();
                    for action in self.machine.on_created(&ends?, &table)? {
                        if let PeerAction::Send(kind, body) = action {
                            answers.push((kind, body));
                        }
                    }
                }
                PeerAction::Acknowledged(generation) => {
                    tracing::debug!(generation, "a client uses the table");
                    self.seat.iter().for_each(|seat| seat.acknowledged(generation));
                }
                PeerAction::Usage(usage) => self.published.residency.used(&usage),
                PeerAction::Damaged(damaged) => self.published.residency.damaged(damaged),
            }
        }
        Ok(answers)
    }

    /// The current table, for a client that has an older one.
    pub(crate) fn newer_table(&mut self) -> Result<Option<(Kind, Vec<u8>)>, ClientEnd> {
        let live = self.published.residency.live();
        if self.seat.is_none() || live.generation() <= self.sent {
            return Ok(None);
        }
        let table = live.table();
        self.sent = table.generation();
        let sends = self.machine.update(&table)?.into_iter().find_map(|action| match action {
            PeerAction::Send(kind, body) => Some((kind, body)),
            _ => None,
        });
        Ok(sends)
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
