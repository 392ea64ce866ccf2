//! The client's side.

use std::sync::Arc;

use super::{BringUp, HandshakeError, decoded, made};
use crate::choose::RailSpec;
use crate::facts::{DeviceFacts, Gid};
use crate::message::OfferedRail;
use crate::message::{
    Connect, ConnectRail, Connected, ConnectedRail, Kind, MAX_QPS_PER_RAIL, Offer, QueuePairEnd,
    Request, SpillTerms, TableAck,
};
use crate::pairing::{
    OneRail, OneWanted, PairError, Pairing, RailPair, RailWishes, pair, pair_one,
};
use crate::route::KernelRoute;
use crate::table::{CheckedTable, LayerShape, Table};

/// Which of its rails a client wants to carry over one connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Carry {
    /// All of them.
    #[default]
    All,
    /// One of them.
    One(OneWanted),
}

/// What a client wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientSettings {
    /// Which rails.
    pub wishes: RailWishes,
    /// Which of them this connection carries.
    pub carry: Carry,
    /// Queue pairs on each rail, 1 to [`MAX_QPS_PER_RAIL`]; fewer where the peer allows fewer. One
    /// queue pair has at most its READ depth outstanding, often 16, so a fast rail needs two.
    pub queue_pairs: u8,
    /// Most READs outstanding per queue pair, 1 to 255; the devices may allow fewer.
    pub depth: u8,
}

impl Default for ClientSettings {
    fn default() -> Self {
        let (wishes, carry) = (RailWishes::default(), Carry::All);
        Self { wishes, carry, queue_pairs: 2, depth: u8::MAX }
    }
}

impl ClientSettings {
    /// The rails that this connection carries, and why there is no second one.
    fn pairing(
        &self,
        offered: &[OfferedRail],
        devices: &[DeviceFacts],
        routes: &[Option<KernelRoute>],
    ) -> Result<Pairing, PairError> {
        match &self.carry {
            Carry::All => pair(offered, devices, routes, &self.wishes),
            Carry::One(wanted) => pair_one(offered, devices, routes, &self.wishes, wanted),
        }
    }
}

/// Queue pairs to create on a rail, in INIT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Create {
    /// The rail's position in the connection, from 0.
    pub rail: usize,
    /// Where.
    pub local: RailSpec,
    /// How many.
    pub queue_pairs: u8,
    /// What the last of them is for, where it is not for READs of the published table.
    pub push: Option<SpillTerms>,
}

/// What the driver does next, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ClientAction {
    /// Send this message.
    Send(Kind, Vec<u8>),
    /// Find the local address from which the kernel would send to each of these, then call
    /// [`on_routes`](ClientRails::on_routes).
    FindRoutes(Vec<Gid>),
    /// Log what was chosen, create these queue pairs, then call
    /// [`on_created`](ClientRails::on_created).
    CreateQueuePairs(Vec<Create>),
    /// Bring the queue pairs of each rail to RTS, then call [`on_up`](ClientRails::on_up).
    ConnectQueuePairs(Vec<BringUp>),
    /// The rails can be used, with this table. Reads may be posted.
    Ready(Arc<CheckedTable>),
    /// Use this table from now on, and post nothing more from an older one; only then send what
    /// follows.
    TableChanged(Arc<CheckedTable>),
}

/// What a client waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientWaits {
    /// The peer's offer.
    Offer,
    /// The driver's routes.
    Routes,
    /// The driver's new queue pairs.
    Created,
    /// The peer's ends.
    Connected,
    /// The driver's connected queue pairs.
    Up,
    /// The peer's table.
    Table,
    /// Nothing: all is set up.
    Nothing,
    /// Nothing any more: it failed.
    Failed,
}

impl ClientWaits {
    /// The name for errors and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Offer => "the peer's Offer",
            Self::Routes => "on_routes",
            Self::Created => "on_created",
            Self::Connected => "the peer's Connected",
            Self::Up => "on_up",
            Self::Table => "the peer's Table",
            Self::Nothing => "nothing, or a newer Table",
            Self::Failed => "nothing: the handshake has failed",
        }
    }
}

/// A rail of the connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientRail {
    /// The offered rail, and the local end and why.
    pub pair: RailPair,
    /// Queue pairs on it, the one for spilled experts among them.
    pub queue_pairs: u8,
}

enum State {
    Offer,
    Routes(Offer),
    Created,
    Connected(Connect),
    /// The peer sends its table right behind `Connected`, so it may come before the driver is done.
    Up(Option<CheckedTable>),
    Table,
    Ready(Arc<CheckedTable>),
    Failed,
}

/// The client's machine.
pub struct ClientRails {
    settings: ClientSettings,
    shapes: Vec<LayerShape>,
    rails: Vec<ClientRail>,
    one_rail: Option<OneRail>,
    spill: Option<SpillTerms>,
    state: State,
}

type Actions = Result<Vec<ClientAction>, HandshakeError>;

impl ClientRails {
    /// Begins; `shapes` are the layers of the store that the connection is attached to.
    #[must_use]
    pub fn start(settings: ClientSettings, shapes: Vec<LayerShape>) -> (Self, ClientAction) {
        let (rails, one_rail, state) = (Vec::new(), None, State::Offer);
        let machine = Self { settings, shapes, rails, one_rail, spill: None, state };
        (machine, ClientAction::Send(Kind::Request, Request.encode()))
    }

    /// What the machine waits for.
    #[must_use]
    pub fn waits_for(&self) -> ClientWaits {
        match self.state {
            State::Offer => ClientWaits::Offer,
            State::Routes(_) => ClientWaits::Routes,
            State::Created => ClientWaits::Created,
            State::Connected(_) => ClientWaits::Connected,
            State::Up(_) => ClientWaits::Up,
            State::Table => ClientWaits::Table,
            State::Ready(_) => ClientWaits::Nothing,
            State::Failed => ClientWaits::Failed,
        }
    }

    /// The rails, in the connection's order; none before the routes are known.
    #[must_use]
    pub fn rails(&self) -> &[ClientRail] {
        &self.rails
    }

    /// How spilled experts come; `None` where the peer has none, and before its offer.
    #[must_use]
    pub fn spill(&self) -> Option<SpillTerms> {
        self.spill
    }

    /// Why there is no second rail, for the log; `None` where there is one, and before the routes
    /// are known.
    #[must_use]
    pub fn one_rail(&self) -> Option<&OneRail> {
        self.one_rail.as_ref()
    }

    /// The table in use; `None` before [`ClientAction::Ready`].
    #[must_use]
    pub fn table(&self) -> Option<&Arc<CheckedTable>> {
        match &self.state {
            State::Ready(table) => Some(table),
            _ => None,
        }
    }

    /// Changes which rails the connection carries; of no effect once the routes are known.
    pub fn carry(&mut self, carry: Carry) {
        self.settings.carry = carry;
    }

    /// Takes a message of the peer's.
    ///
    /// # Errors
    /// The peer broke the protocol, or is of no use to this client.
    pub fn on_message(&mut self, kind: Kind, body: &[u8]) -> Actions {
        let expected = self.waits_for().name();
        match (std::mem::replace(&mut self.state, State::Failed), kind) {
            (State::Offer, Kind::Offer) => self.on_offer(body),
            (State::Connected(connect), Kind::Connected) => self.on_connected(&connect, body),
            (State::Up(earlier), Kind::Table) => {
                let current = earlier.map(|table| table.generation());
                self.state = State::Up(Some(self.newer(current, body)?));
                Ok(Vec::new())
            }
            (State::Table, Kind::Table) => {
                let table = self.newer(None, body)?;
                Ok(self.ready(table))
            }
            (State::Ready(current), Kind::Table) => {
                let table = self.newer(Some(current.generation()), body)?;
                let generation = table.generation();
                let table = Arc::new(table);
                self.state = State::Ready(Arc::clone(&table));
                Ok(vec![ClientAction::TableChanged(table), acknowledge(generation)])
            }
            (_, found) => Err(HandshakeError::OutOfTurn { found, expected }),
        }
    }

    fn on_offer(&mut self, body: &[u8]) -> Actions {
        let offer = decoded(Kind::Offer, Offer::decode(body))?;
        for (at, rail) in offer.rails.iter().enumerate() {
            if offer.rails[..at].iter().any(|earlier| earlier.index == rail.index) {
                return Err(HandshakeError::OfferedTwice { index: rail.index });
            }
        }
        let (found, expected) = (offer.layers as usize, self.shapes.len());
        if found != expected {
            return Err(crate::table::TableError::Layers { found, expected }.into());
        }
        let found = offer.slot_bytes;
        if let Some(shape) = self.shapes.iter().find(|shape| shape.record_bytes > found) {
            let LayerShape { layer, record_bytes, .. } = *shape;
            return Err(HandshakeError::SlotTooSmall { found, layer, record_bytes });
        }
        let gids = offer.rails.iter().map(|rail| rail.gid).collect();
        self.state = State::Routes(offer);
        Ok(vec![ClientAction::FindRoutes(gids)])
    }

    /// Takes what this host has, and the kernel's route to each GID of the
    /// [`FindRoutes`](ClientAction::FindRoutes), where there is one.
    ///
    /// # Errors
    /// No rails can be paired, with the reason; or the call was not due.
    pub fn on_routes(
        &mut self,
        devices: &[DeviceFacts],
        routes: &[Option<KernelRoute>],
    ) -> Actions {
        let expected = self.waits_for().name();
        let State::Routes(offer) = std::mem::replace(&mut self.state, State::Failed) else {
            return Err(HandshakeError::Driver { called: "on_routes", expected });
        };
        self.spill = offer.spill;
        let Pairing { pairs, one_rail } = self.settings.pairing(&offer.rails, devices, routes)?;
        self.one_rail = one_rail;
        let wanted = self.settings.queue_pairs.clamp(1, MAX_QPS_PER_RAIL as u8);
        let wanted = wanted.saturating_add(u8::from(self.spill.is_some()));
        let rail = |pair: RailPair| {
            let queue_pairs = wanted.min(pair.offered.most_queue_pairs);
            ClientRail { pair, queue_pairs }
        };
        self.rails = pairs.into_iter().map(rail).collect();
        self.state = State::Created;
        let create = |(rail, at): (usize, &ClientRail)| Create {
            rail,
            local: at.pair.local.spec.clone(),
            queue_pairs: at.queue_pairs,
            // One that has no READs but the staged ones would be of no use.
            push: self.spill.filter(|_| at.queue_pairs > 1),
        };
        let creates = self.rails.iter().enumerate().map(create).collect();
        Ok(vec![ClientAction::CreateQueuePairs(creates)])
    }

    /// Takes the numbers of the created queue pairs, rail by rail, each with a random PSN.
    ///
    /// # Errors
    /// There are more or fewer than asked for, or the call was not due.
    pub fn on_created(&mut self, created: &[Vec<QueuePairEnd>]) -> Actions {
        let expected = self.waits_for().name();
        let State::Created = std::mem::replace(&mut self.state, State::Failed) else {
            return Err(HandshakeError::Driver { called: "on_created", expected });
        };
        made("rails' queue pairs", created.len(), self.rails.len())?;
        let mut rails = Vec::new();
        for (rail, ends) in self.rails.iter().zip(created) {
            made("queue pairs", ends.len(), usize::from(rail.queue_pairs))?;
            let local = &rail.pair.local.spec;
            rails.push(ConnectRail {
                index: rail.pair.offered.index,
                node_guid: local.node_guid,
                port: local.port,
                gid: local.gid,
                lid: local.lid,
                mtu: local.mtu,
                depth: local.initiator_depth.min(self.settings.depth).max(1),
                queue_pairs: ends.clone(),
                push: self.spill.is_some() && rail.queue_pairs > 1,
            });
        }
        let connect = Connect { rails };
        let body = connect.encode();
        self.state = State::Connected(connect);
        Ok(vec![ClientAction::Send(Kind::Connect, body)])
    }

    fn on_connected(&mut self, connect: &Connect, body: &[u8]) -> Actions {
        let connected = decoded(Kind::Connected, Connected::decode(body))?;
        let found: Vec<_> = connected.rails.iter().map(|rail| rail.index).collect();
        let expected: Vec<_> = connect.rails.iter().map(|rail| rail.index).collect();
        if found != expected {
            return Err(HandshakeError::OtherRails { found, expected });
        }
        let both = connect.rails.iter().zip(connected.rails).zip(&self.rails);
        let bring_up = both.map(|((sent, answer), rail)| bring_up(sent, answer, rail));
        let bring_up = bring_up.collect::<Result<_, _>>()?;
        self.state = State::Up(None);
        Ok(vec![ClientAction::ConnectQueuePairs(bring_up)])
    }

    /// Every queue pair is in RTS.
    ///
    /// # Errors
    /// The call was not due.
    pub fn on_up(&mut self) -> Actions {
        let expected = self.waits_for().name();
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Up(Some(table)) => Ok(self.ready(table)),
            State::Up(None) => {
                self.state = State::Table;
                Ok(Vec::new())
            }
            _ => Err(HandshakeError::Driver { called: "on_up", expected }),
        }
    }

    /// A table that fits the store and the connection, newer than the one before.
    fn newer(&self, current: Option<u64>, body: &[u8]) -> Result<CheckedTable, HandshakeError> {
        let table = Table::decode(body)?.check(&self.shapes, self.rails.len())?;
        let found = table.generation();
        match current {
            Some(current) if found <= current => Err(HandshakeError::OldTable { found, current }),
            _ => Ok(table),
        }
    }

    fn ready(&mut self, table: CheckedTable) -> Vec<ClientAction> {
        let generation = table.generation();
        let table = Arc::new(table);
        self.state = State::Ready(Arc::clone(&table));
        vec![ClientAction::Ready(table), acknowledge(generation)]
    }
}

fn acknowledge(generation: u64) -> ClientAction {
    ClientAction::Send(Kind::TableAck, TableAck { generation }.encode())
}

/// Holds the peer's answer for a rail against what both ends said before.
fn bring_up(
    sent: &ConnectRail,
    answer: ConnectedRail,
    rail: &ClientRail,
) -> Result<BringUp, HandshakeError> {
    let index = sent.index;
    let (found, expected) = (answer.queue_pairs.len(), sent.queue_pairs.len());
    if found != expected {
        return Err(HandshakeError::QueuePairs { index, found, expected });
    }
    let offered = &rail.pair.offered;
    let (found, most) = (answer.mtu, sent.mtu.min(offered.mtu));
    if found > most {
        return Err(HandshakeError::MtuTooLarge { index, found, most });
    }
    let (found, most) = (answer.depth, sent.depth.min(offered.depth));
    if found > most {
        return Err(HandshakeError::DepthTooLarge { index, found, most });
    }
    Ok(BringUp {
        index,
        address: offered.target().address(&sent.gid),
        mtu: answer.mtu,
        depth: answer.depth,
        remote: answer.queue_pairs,
    })
}
