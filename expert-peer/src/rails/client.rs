//! One client's queue pairs: made in its handshake, gone with its connection.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use gpu_sys::verbs::{CompletionQueue, QueuePair, QueuePairOptions, RemoteAccess, VerbsError};
use railset::driver;
use railset::handshake::HandshakeError;
use railset::handshake::peer::{CreateConnected, PeerAction, PeerHandshake};
use railset::message::{Kind, Psn, Qpn, QueuePairEnd};
use railset::table::Table;
use railset::wire::DecodeError;
use rand::Rng;

use super::{Offered, Published, Served};
use crate::push::{ClientId, LaneTicket};
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
    /// A device of the client's rails failed, or is not there any more.
    #[error("the device {0} failed or is not there any more: connect again for other rails")]
    DeviceGone(String),
    /// The control connection cannot be shared with the thread that pushes.
    #[error("no descriptor for a client's pushes: {0}; `ulimit -n` limits descriptors")]
    Socket(#[source] io::Error),
}

/// The rails of one connection.
pub(crate) struct RailClient {
    published: Arc<Published>,
    machine: PeerHandshake,
    /// Nothing is ever posted on them; dropping them ends the client's access.
    pairs: Vec<QueuePair<()>>,
    /// The client's queue pairs for spilled records, which end with these.
    lanes: Vec<LaneTicket>,
    client: ClientId,
    socket: TcpStream,
    /// The device of each offered rail; its registration goes after the queue pairs.
    served: Vec<Arc<Served>>,
    /// Among those that are waited for before slots are overwritten; given up after the queue pairs.
    seat: Option<Seat>,
    /// Generation of the newest table that was sent.
    sent: u64,
}

impl RailClient {
    /// For `client`, whose control connection is `socket`, and who gets `offered`.
    pub(crate) fn new(
        published: &Arc<Published>,
        offered: Offered,
        client: ClientId,
        socket: &TcpStream,
    ) -> Result<Self, ClientEnd> {
        let Offered { rails, served } = offered;
        let machine = PeerHandshake::new(Arc::new(rails));
        let socket = socket.try_clone().map_err(ClientEnd::Socket)?;
        let (published, pairs, lanes) = (Arc::clone(published), Vec::new(), Vec::new());
        Ok(Self { published, machine, pairs, lanes, client, socket, served, seat: None, sent: 0 })
    }

    /// Queue pairs of this client that it READs through.
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
                    let table = self.with_columns(&live.table());
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
        let used = self.machine.rails().iter().filter_map(|at| self.served.get(*at));
        if let Some(gone) = used.into_iter().find(|served| served.is_lost()) {
            return Err(ClientEnd::DeviceGone(gone.name().to_owned()));
        }
        let live = self.published.residency.live();
        if self.seat.is_none() || live.generation() <= self.sent {
            return Ok(None);
        }
        let table = self.with_columns(&live.table());
        self.sent = table.generation();
        let sends = self.machine.update(&table)?.into_iter().find_map(|action| match action {
            PeerAction::Send(kind, body) => Some((kind, body)),
            _ => None,
        });
        Ok(sends)
    }

    /// The table with the keys of the devices that this client was offered.
    fn with_columns(&self, table: &Table) -> Table {
        let columns: Vec<_> = self.served.iter().map(|served| served.column()).collect();
        table.with_columns(&columns)
    }

    fn create(&mut self, create: &CreateConnected) -> Result<Vec<QueuePairEnd>, ClientEnd> {
        let CreateConnected { local, bring_up, push } = create;
        let domain = self.served[usize::from(bring_up.index)].domain();
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
        let reads = bring_up.remote.len() - usize::from(push.is_some());
        for &remote in &bring_up.remote[..reads] {
            let prepared = QueuePair::prepare(domain, &queue, &queue, options)?;
            let psn = Psn::from_random(rand::rng().next_u32());
            ends.push(QueuePairEnd { qpn: Qpn::new(prepared.number())?, psn });
            let (remote, local) = driver::ends(bring_up, local, remote, psn);
            self.pairs.push(prepared.connect(&remote, &local).map_err(|error| error.source)?);
        }
        if let (Some(_), Some(&remote)) = (push, bring_up.remote.last()) {
            ends.push(self.open_lane(create, remote)?);
        }
        Ok(ends)
    }

    /// Makes the queue pair for spilled records, and hands it to the thread that serves them.
    fn open_lane(
        &mut self,
        create: &CreateConnected,
        remote: QueuePairEnd,
    ) -> Result<QueuePairEnd, ClientEnd> {
        let CreateConnected { local, bring_up, .. } = create;
        let at = usize::from(bring_up.index);
        let nothing = || HandshakeError::NothingSpilled { index: bring_up.index };
        let push = self.published.push.as_ref().ok_or_else(nothing)?;
        let device = self.served[at].push_device().ok_or_else(nothing)?;
        let lane = push.prepare(device, local.port)?;
        let psn = Psn::from_random(rand::rng().next_u32());
        let end = QueuePairEnd { qpn: Qpn::new(lane.number())?, psn };
        let (remote, local) = driver::ends(bring_up, local, remote, psn);
        let socket = self.socket.try_clone().map_err(ClientEnd::Socket)?;
        self.lanes.push(push.connect(lane, (&remote, &local), self.client, socket)?);
        Ok(end)
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
