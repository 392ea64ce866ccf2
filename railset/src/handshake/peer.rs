//! The peer's side.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{BringUp, HandshakeError, decoded, made};
use crate::choose::{RailIdentity, RailSpec, Target};
use crate::message::{
    Connect, ConnectRail, Connected, ConnectedRail, Damaged, Kind, MAX_QPS_PER_RAIL, MAX_RAILS,
    Offer, OfferedRail, QueuePairEnd, Request, SpillTerms, TableAck, Usage,
};
use crate::table::Table;

/// Tables that may be on their way to a client that has not acknowledged them.
///
/// A client that reads acknowledges at once; one that does not must not make the peer hold more.
pub const MAX_UNACKNOWLEDGED: usize = 64;

/// The rails of a peer, the same for every client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerRails {
    offer: Offer,
    specs: Vec<RailSpec>,
}

impl PeerRails {
    /// What is offered: `rails` get the indices 0, 1, and so on. Rails beyond [`MAX_RAILS`] are
    /// left out.
    ///
    /// `queue_pairs` is how many a client may have on each, 1 to [`MAX_QPS_PER_RAIL`]; `layers`,
    /// `generation` and `slot_bytes` describe the table, `spill` how what it does not have comes.
    #[must_use]
    pub fn new(
        rails: &[RailSpec],
        queue_pairs: u8,
        layers: u32,
        generation: u64,
        slot_bytes: u64,
        spill: Option<SpillTerms>,
    ) -> Self {
        let offered = |(index, spec): (u8, &RailSpec)| OfferedRail {
            index,
            device: spec.device.clone(),
            node_guid: spec.node_guid,
            port: spec.port,
            link_layer: spec.link_layer,
            gid: spec.gid,
            lid: spec.lid,
            mtu: spec.mtu,
            depth: spec.responder_depth.max(1),
            most_queue_pairs: queue_pairs.clamp(1, MAX_QPS_PER_RAIL as u8),
        };
        let rails = &rails[..rails.len().min(MAX_RAILS)];
        let offer = Offer {
            rails: (0..).zip(rails).map(offered).collect(),
            layers,
            generation,
            slot_bytes,
            spill,
        };
        Self { offer, specs: rails.to_vec() }
    }

    /// The same with the table's generation of now.
    #[must_use]
    pub fn with_generation(&self, generation: u64) -> Self {
        let mut now = self.clone();
        now.offer.generation = generation;
        now
    }

    /// What is offered to a client.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }
}

/// Queue pairs to create on a rail and to connect to the client's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CreateConnected {
    /// Where.
    pub local: RailSpec,
    /// The client's ends, one for each queue pair to create, and how to connect to them.
    pub bring_up: BringUp,
    /// What the last of them is for, where it is not for READs of the published table.
    pub push: Option<SpillTerms>,
}

/// What the driver does next, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerAction {
    /// Send this message.
    Send(Kind, Vec<u8>),
    /// Create these queue pairs with random PSNs, bring them to RTS, then call
    /// [`on_created`](PeerHandshake::on_created) with their numbers and the table.
    CreateQueuePairs(Vec<CreateConnected>),
    /// The client uses the table of this generation and has stopped posting from older ones. The
    /// first one says that the client's queue pairs are up.
    Acknowledged(u64),
    /// What the client has read since its last report.
    Usage(Usage),
    /// The client got other bytes than a record's.
    Damaged(Damaged),
}

/// What a peer waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerWaits {
    /// The client's request.
    Request,
    /// The client's ends.
    Connect,
    /// The driver's connected queue pairs.
    Created,
    /// The acknowledgement of a table.
    TableAck,
    /// Nothing: all is set up and acknowledged.
    Nothing,
    /// Nothing any more: it failed.
    Failed,
}

impl PeerWaits {
    /// The name for errors and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Request => "the client's Request",
            Self::Connect => "the client's Connect",
            Self::Created => "on_created",
            Self::TableAck => "the client's TableAck",
            Self::Nothing => "nothing",
            Self::Failed => "nothing: the handshake has failed",
        }
    }
}

enum State {
    Request,
    Connect,
    Created(Vec<BringUp>),
    Ready,
    Failed,
}

/// The peer's machine for one client.
pub struct PeerHandshake {
    rails: Arc<PeerRails>,
    state: State,
    /// Position in the offer of each of the connection's rails.
    used: Vec<usize>,
    /// Generation of the newest table sent.
    sent: u64,
    unacknowledged: VecDeque<u64>,
    acknowledged: Option<u64>,
}

type Actions = Result<Vec<PeerAction>, HandshakeError>;

impl PeerHandshake {
    /// Waits for the request of a client that is attached.
    #[must_use]
    pub fn new(rails: Arc<PeerRails>) -> Self {
        Self {
            rails,
            state: State::Request,
            used: Vec::new(),
            sent: 0,
            unacknowledged: VecDeque::new(),
            acknowledged: None,
        }
    }

    /// What the machine waits for.
    #[must_use]
    pub fn waits_for(&self) -> PeerWaits {
        match self.state {
            State::Request => PeerWaits::Request,
            State::Connect => PeerWaits::Connect,
            State::Created(_) => PeerWaits::Created,
            State::Ready if self.unacknowledged.is_empty() => PeerWaits::Nothing,
            State::Ready => PeerWaits::TableAck,
            State::Failed => PeerWaits::Failed,
        }
    }

    /// Generation of the newest table that the client has acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> Option<u64> {
        self.acknowledged
    }

    /// Offered indices of the connection's rails, in its order; none before the client's connect.
    #[must_use]
    pub fn rails(&self) -> &[usize] {
        &self.used
    }

    /// Takes a message of the client's.
    ///
    /// # Errors
    /// The client broke the protocol or wants what it may not have.
    pub fn on_message(&mut self, kind: Kind, body: &[u8]) -> Actions {
        let expected = self.waits_for().name();
        match (std::mem::replace(&mut self.state, State::Failed), kind) {
            (State::Request, Kind::Request) => {
                decoded(kind, Request::decode(body))?;
                self.state = State::Connect;
                Ok(vec![PeerAction::Send(Kind::Offer, self.rails.offer.encode())])
            }
            (State::Connect, Kind::Connect) => self.on_connect(body),
            (State::Ready, Kind::TableAck) => self.on_ack(body),
            (State::Ready, Kind::Usage) => {
                let usage = decoded(kind, Usage::decode(body))?;
                self.state = State::Ready;
                Ok(vec![PeerAction::Usage(usage)])
            }
            (State::Ready, Kind::Damaged) => {
                let damaged = decoded(kind, Damaged::decode(body))?;
                self.state = State::Ready;
                Ok(vec![PeerAction::Damaged(damaged)])
            }
            (_, found) => Err(HandshakeError::OutOfTurn { found, expected }),
        }
    }

    fn on_connect(&mut self, body: &[u8]) -> Actions {
        let connect = decoded(Kind::Connect, Connect::decode(body))?;
        for (at, rail) in connect.rails.iter().enumerate() {
            let is_one = |earlier: &&ConnectRail| {
                earlier.index == rail.index || identity(earlier).is_same(&identity(rail))
            };
            if let Some(earlier) = connect.rails[..at].iter().find(is_one) {
                let (first, second) = (earlier.index, rail.index);
                return Err(HandshakeError::OneRail { first, second });
            }
        }
        let rails = Arc::clone(&self.rails);
        let (mut creates, mut bring_ups) = (Vec::new(), Vec::new());
        for rail in connect.rails {
            let at = usize::from(rail.index);
            let (Some(offered), Some(local)) = (rails.offer.rails.get(at), rails.specs.get(at))
            else {
                let offered = rails.specs.len();
                return Err(HandshakeError::NotOffered { index: rail.index, offered });
            };
            let push = rails.offer.spill.filter(|_| rail.push);
            if rail.push && push.is_none() {
                return Err(HandshakeError::NothingSpilled { index: rail.index });
            }
            let bring_up = bring_up(offered, rail)?;
            let local = local.clone();
            creates.push(CreateConnected { local, bring_up: bring_up.clone(), push });
            bring_ups.push(bring_up);
            self.used.push(at);
        }
        self.state = State::Created(bring_ups);
        Ok(vec![PeerAction::CreateQueuePairs(creates)])
    }

    /// Takes the numbers of the connected queue pairs, rail by rail, and the table with a column
    /// for each offered rail.
    ///
    /// # Errors
    /// There are more or fewer than asked for, or the call was not due.
    pub fn on_created(&mut self, created: &[Vec<QueuePairEnd>], table: &Table) -> Actions {
        let expected = self.waits_for().name();
        let State::Created(asked) = std::mem::replace(&mut self.state, State::Failed) else {
            return Err(HandshakeError::Driver { called: "on_created", expected });
        };
        made("rails' queue pairs", created.len(), asked.len())?;
        let mut rails = Vec::new();
        for (rail, ends) in asked.iter().zip(created) {
            made("queue pairs", ends.len(), rail.remote.len())?;
            let BringUp { index, mtu, depth, .. } = *rail;
            rails.push(ConnectedRail { index, mtu, depth, queue_pairs: ends.clone() });
        }
        let connected = PeerAction::Send(Kind::Connected, Connected { rails }.encode());
        let table = self.publish(table)?;
        self.state = State::Ready;
        Ok(vec![connected, table])
    }

    /// Sends a newer table; nothing, while the client is not connected and so has no older one.
    ///
    /// # Errors
    /// The table is not newer, or [`MAX_UNACKNOWLEDGED`] are on their way already.
    pub fn update(&mut self, table: &Table) -> Actions {
        match self.state {
            State::Ready => {}
            State::Failed => {
                let expected = self.waits_for().name();
                return Err(HandshakeError::Driver { called: "update", expected });
            }
            _ => return Ok(Vec::new()),
        }
        let (found, current) = (table.generation(), self.sent);
        if found <= current {
            return Err(HandshakeError::OldTable { found, current });
        }
        if self.unacknowledged.len() >= MAX_UNACKNOWLEDGED {
            self.state = State::Failed;
            return Err(HandshakeError::Unacknowledged { most: MAX_UNACKNOWLEDGED });
        }
        Ok(vec![self.publish(table)?])
    }

    /// The message with the columns of the connection's rails.
    fn publish(&mut self, table: &Table) -> Result<PeerAction, HandshakeError> {
        let (found, expected) = (table.rails(), self.rails.specs.len());
        let own = table.for_rails(&self.used).filter(|_| found == expected);
        let own = own.ok_or(HandshakeError::Columns { found, expected })?;
        self.sent = own.generation();
        self.unacknowledged.push_back(self.sent);
        Ok(PeerAction::Send(Kind::Table, own.encode()))
    }

    fn on_ack(&mut self, body: &[u8]) -> Actions {
        let TableAck { generation } = decoded(Kind::TableAck, TableAck::decode(body))?;
        // It puts every older table away too.
        let Some(at) = self.unacknowledged.iter().position(|sent| *sent == generation) else {
            let due = self.unacknowledged.iter().copied().collect();
            return Err(HandshakeError::Acknowledged { found: generation, due });
        };
        self.unacknowledged.drain(..=at);
        self.acknowledged = Some(generation);
        self.state = State::Ready;
        Ok(vec![PeerAction::Acknowledged(generation)])
    }
}

fn identity(rail: &ConnectRail) -> RailIdentity {
    RailIdentity { node_guid: rail.node_guid, port: rail.port, gid: rail.gid }
}

/// Holds a client's rail against the offered one.
fn bring_up(offered: &OfferedRail, rail: ConnectRail) -> Result<BringUp, HandshakeError> {
    let index = rail.index;
    let (found, most) = (rail.queue_pairs.len(), offered.most_queue_pairs);
    if found > usize::from(most) {
        return Err(HandshakeError::TooManyQueuePairs { index, found, most });
    }
    let client = Target { link_layer: offered.link_layer, gid: rail.gid, lid: rail.lid };
    if let Some(why) = client.obstacle(&offered.target()) {
        let (client, offered) = (rail.gid, offered.gid);
        return Err(HandshakeError::Unreachable { index, client, offered, why });
    }
    Ok(BringUp {
        index,
        address: client.address(&offered.gid),
        mtu: rail.mtu.min(offered.mtu),
        depth: rail.depth.min(offered.depth),
        remote: rail.queue_pairs,
    })
}
