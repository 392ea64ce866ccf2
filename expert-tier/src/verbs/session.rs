//! A rail and the control connection that it lives by.
//!
//! Every rail has a connection of its own: the peer's end of it goes with the connection, so one
//! rail can be given up and set up anew while another carries on, and nothing of the old one is left
//! at the peer. A rail is used only after a READ over it has brought a record's first bytes: that a
//! control connection comes up says nothing of the way that the data takes.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use gpu_sys::env;
use gpu_sys::verbs::Remote;
use railset::choose::Routed;
use railset::driver;
use railset::handshake::HandshakeError;
use railset::handshake::client::{Carry, ClientAction, ClientRails, ClientSettings};
use railset::message::Kind;
use railset::pairing::OneRail;
use railset::table::LayerShape;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::OpenError;
use super::desk::Desk;
use super::inbox::{self, Inbox};
use super::rail::{PreparedRail, Rail};
use crate::key::ExpertKey;
use crate::layout::{ExpertLayout, LayerLayout, SpecDigest, header_bytes};
use crate::pieces::PIECE_BYTES;
use crate::record::RecordIdentity;
use crate::tcp::Dialler;
use crate::wire::frame::{FrameType, Status};
use crate::wire::handshake::{Goal, encode_frame};
use crate::wire::io::{Clock, read_frame, write_all};

/// Largest table that is taken from a peer, in bytes of its body.
const MAX_FRAME_BYTES: u64 = 64 << 20;
/// Most bytes that a new rail is tried with: more than one packet, so that a path that drops large
/// ones is found out.
pub(super) const PROBE_BYTES: u64 = 8192;
/// Slots to try new rails with. Each thread that sets up rails uses one at a time; a slot whose queue pair cannot be destroyed is
/// lost, and must not keep every later rail from being tried.
pub(super) const PROBES: u32 = 8;

/// Control connections that are listened to at once: two rails, and those that they replace.
const MAX_HEARD: usize = 4;

/// A record of `bytes`, as far as cutting it goes; nobody looks at what comes.
fn probe(bytes: u64) -> RecordIdentity {
    RecordIdentity {
        fingerprint_prefix: [0; 16],
        key: ExpertKey::new(0, 0),
        spec: SpecDigest([0; 8]),
        payload_bytes: bytes.saturating_sub(header_bytes(1)).max(1),
        chunk_bytes: PIECE_BYTES,
    }
}

/// A control connection whose rail is up.
pub(super) struct Session {
    /// The rail's number in this process.
    pub(super) rail: u64,
    socket: TcpStream,
    inbox: Inbox,
    machine: ClientRails,
}

/// A rail that has just been set up.
pub(super) struct Opened {
    pub(super) session: Session,
    pub(super) rail: Rail,
    /// Why the two ends have no second rail, if they have none.
    pub(super) one_rail: Option<OneRail>,
}

/// Which pairs of ends an attempt may choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pairs {
    Any,
    /// Those that have not failed yet.
    Untried,
}

/// Connects to the peer and sets up the client's rail `slot`.
pub(super) fn dial(
    desk: &Desk,
    dialler: &Dialler,
    slot: usize,
    pairs: Pairs,
) -> Result<Opened, OpenError> {
    let goal = Goal::Resume(Arc::clone(&desk.manifest));
    let socket = dialler.dial_unless(&|| desk.closing(), goal)?;
    open(desk, socket, slot, pairs)
}

/// Agrees with the peer on rail `slot` over `socket`, which is attached, and tries it.
pub(super) fn open(
    desk: &Desk,
    socket: TcpStream,
    slot: usize,
    pairs: Pairs,
) -> Result<Opened, OpenError> {
    let options = &desk.options;
    let settings = ClientSettings {
        wishes: options.wishes.clone(),
        carry: Carry::default(),
        queue_pairs: options.queue_pairs,
        depth: u8::MAX,
    };
    let (machine, first) = ClientRails::start(settings, shapes(desk.manifest.layout()));
    let clock = Clock::start(options.connect, env::EXPERT_CONNECT_MS.name);
    let rail = desk.next_rail();
    let stopped = || desk.closing();
    let clock = clock.or_when(&stopped);
    let mut opening = Opening { desk, socket, machine, clock, prepared: None, slot, pairs, rail };
    let mut opened = opening.run(first)?;
    let pair = opening.machine.rails().first().map(|rail| &rail.pair);
    let why = pair.map(|pair| pair.local.explanation.routed);
    if let Err(error) = try_out(desk, &mut opened, why) {
        // What is lost with it is a probe, which no call waits for.
        drop(opened.destroy());
        return Err(error);
    }
    if let Some(pair) = pair {
        tracing::info!(peer = %options.peer, slot, "rail {pair}");
    }
    let one_rail = opening.machine.one_rail().cloned();
    let Opening { socket, machine, .. } = opening;
    let session = Session { rail, socket, inbox: Inbox::default(), machine };
    Ok(Opened { session, rail: opened, one_rail })
}

/// Reads the first bytes of a record that the peer has, over a rail that is not in use yet.
/// `chosen` is how it stands to the route, which may be why it does not work.
fn try_out(desk: &Desk, rail: &mut Rail, chosen: Option<Routed>) -> Result<(), OpenError> {
    let failed = |rail: &Rail, why| {
        let (name, peer) = (rail.name(), desk.options.peer.clone());
        let rail = chosen.map_or(name.clone(), |chosen| format!("{name} (chosen since {chosen})"));
        OpenError::TryOut { rail, peer, why }
    };
    let layers = desk.manifest.layout().layers();
    let mut keys = (0..).zip(layers).flat_map(|(at, layer)| {
        (0..layer.experts()).map(move |expert| (at, expert, layer.record_bytes()))
    });
    let found =
        keys.find_map(|(at, expert, bytes)| rail.place(at, expert).map(|place| (place, bytes)));
    // With nothing in the peer's memory there is nothing to try it with: the first push shows what
    // the way is worth, and its deadline.
    let Some((place, record_bytes)) = found else { return Ok(()) };
    let slot = desk.probe.acquire(PROBE_BYTES, desk.options.deadline);
    let slot = slot.map_err(|error| failed(rail, error.to_string()))?;
    let begun = slot.begin_parted(probe(record_bytes.min(PROBE_BYTES)));
    let mut slot = begun.map_err(|error| failed(rail, error.to_string()))?;
    let Some(part) = slot.part(PROBE_BYTES as usize) else { return Ok(()) };
    let remote = Remote { address: place.address, rkey: place.rkey };
    rail.try_out(part, remote, desk.options.deadline).map_err(|why| failed(rail, why))
}

/// The handshake's driver.
struct Opening<'a> {
    desk: &'a Desk,
    socket: TcpStream,
    machine: ClientRails,
    clock: Clock<'a>,
    prepared: Option<PreparedRail>,
    slot: usize,
    pairs: Pairs,
    rail: u64,
}

impl Opening<'_> {
    fn run(&mut self, first: ClientAction) -> Result<Rail, OpenError> {
        let mut actions = VecDeque::from([first]);
        let mut rail = None;
        let mut table = None;
        loop {
            let Some(action) = actions.pop_front() else {
                if let (Some(_), Some(table)) = (&rail, table.take()) {
                    let mut rail: Rail = rail.take().ok_or(OpenError::NoRail)?;
                    rail.use_table(table);
                    return Ok(rail);
                }
                let (kind, body) = self.hear()?;
                let more = self.machine.on_message(kind, &body);
                actions.extend(more.map_err(|error| self.disagreed(error))?);
                continue;
            };
            let more = match action {
                ClientAction::Send(kind, body) => {
                    self.say(kind, &body)?;
                    Ok(Vec::new())
                }
                ClientAction::FindRoutes(gids) => {
                    let facts = self.desk.devices.facts()?;
                    let routes: Vec<_> = gids.iter().map(driver::route_towards).collect();
                    // What the other rail takes is looked up as late as can be.
                    self.machine.carry(Carry::One(self.desk.wanted(self.slot)));
                    let paired = self.machine.on_routes(&facts, &routes);
                    if paired.is_ok() {
                        self.claim()?;
                    }
                    paired
                }
                ClientAction::CreateQueuePairs(creates) => {
                    for create in creates {
                        let device = self.desk.devices.device(&create.local.device)?;
                        if let Some(terms) = create.push {
                            self.desk.try_grant(&device, terms)?;
                        }
                        let depth = self.desk.options.queue_pair_depth;
                        self.prepared = Some(PreparedRail::new(&create, device, depth)?);
                    }
                    let prepared = self.prepared.as_ref().ok_or(OpenError::NoRail)?;
                    let ends = prepared.ends().map_err(|source| OpenError::QueuePair { source })?;
                    self.machine.on_created(&[ends])
                }
                ClientAction::ConnectQueuePairs(ups) => {
                    let prepared = self.prepared.take().ok_or(OpenError::NoRail)?;
                    let up = ups.first().ok_or(OpenError::NoRail)?;
                    let pair = self.machine.rails().first().ok_or(OpenError::NoRail)?;
                    let place = (self.rail, self.slot);
                    rail = Some(prepared.connect(place, &pair.pair, up)?);
                    self.machine.on_up()
                }
                ClientAction::Ready(first) | ClientAction::TableChanged(first) => {
                    table = Some(first);
                    Ok(Vec::new())
                }
            };
            for action in more.map_err(|error| self.disagreed(error))?.into_iter().rev() {
                actions.push_front(action);
            }
        }
    }

    /// Claims the pair that was chosen, so that no other rail gets one of its ends.
    fn claim(&self) -> Result<(), OpenError> {
        let pair = &self.machine.rails().first().ok_or(OpenError::NoRail)?.pair;
        let (ends, one_rail) = (pair.ends(), self.machine.one_rail());
        if self.pairs == Pairs::Untried && self.desk.wanted(self.slot).failed.contains(&ends) {
            return Err(OpenError::NoOtherPair);
        }
        match self.desk.claim(self.slot, ends, one_rail) {
            true => Ok(()),
            false => Err(OpenError::Taken { rail: pair.local.spec.to_string() }),
        }
    }

    fn say(&mut self, kind: Kind, body: &[u8]) -> Result<(), OpenError> {
        let bytes = encode_frame(kind.into(), Status::Ok, body);
        write_all(&mut self.socket, &bytes, &self.clock).map_err(|source| self.io(source))
    }

    fn hear(&mut self) -> Result<(Kind, Vec<u8>), OpenError> {
        let frame = read_frame(&mut self.socket, MAX_FRAME_BYTES, &self.clock);
        let (header, body) = frame.map_err(|source| self.io(source))?;
        let kind = rails_kind(header.frame, header.status, &body);
        let peer = self.desk.options.peer.clone();
        Ok((kind.map_err(|reason| OpenError::Refused { peer, reason })?, body))
    }

    fn io(&self, source: crate::wire::io::IoError) -> OpenError {
        let (peer, due) = (self.desk.options.peer.clone(), self.machine.waits_for().name());
        OpenError::Io { peer, due, source }
    }

    fn disagreed(&self, source: HandshakeError) -> OpenError {
        OpenError::Agree { peer: self.desk.options.peer.clone(), source: Box::new(source) }
    }
}

/// The message that a frame carries, or why the peer sent something else.
fn rails_kind(frame: FrameType, status: Status, body: &[u8]) -> Result<Kind, String> {
    if frame == FrameType::Refusal {
        let text = String::from_utf8_lossy(body);
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        return Err(format!("{}: {text}", status.name()));
    }
    if frame == FrameType::Drain {
        return Err("it is shutting down".into());
    }
    frame
        .rails_kind()
        .ok_or_else(|| format!("it sent a {frame:?} frame while rails were agreed on"))
}

/// Every layer's experts and record size, as the table must have them.
fn shapes(layout: &ExpertLayout) -> Vec<LayerShape> {
    let shape = |layer: &LayerLayout| LayerShape {
        layer: layer.layer(),
        experts: layer.experts(),
        record_bytes: layer.record_bytes(),
    };
    layout.layers().iter().map(shape).collect()
}

impl Session {
    /// Tells the peer something that it does not answer; an error ends the session.
    pub(super) fn say(&self, kind: Kind, body: &[u8]) -> Result<(), String> {
        inbox::answer(&self.socket, &encode_frame(kind.into(), Status::Ok, body))
    }

    /// Takes what the peer has sent, at most one frame; an error ends the session.
    pub(super) fn hear(&mut self, desk: &Desk) -> Result<(), String> {
        let came = self.inbox.take(&self.socket, MAX_FRAME_BYTES);
        let Some((header, body)) = came.map_err(|error| error.to_string())? else { return Ok(()) };
        if header.frame == FrameType::Drain {
            tracing::info!(peer = %desk.options.peer, "the peer is shutting down");
            desk.retire_rail(self.rail);
            return Ok(());
        }
        let kind = rails_kind(header.frame, header.status, &body)?;
        let actions = self.machine.on_message(kind, &body).map_err(|error| error.to_string())?;
        for action in actions {
            match action {
                ClientAction::TableChanged(table) => desk.table_changed(self.rail, &table),
                ClientAction::Send(kind, body) => self.say(kind, &body)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Fails once the peer has left a frame unfinished for the deadline.
    pub(super) fn check_time(&self, desk: &Desk) -> Result<(), String> {
        let (bound, setting) = (desk.options.deadline, env::EXPERT_DEADLINE_MS.name);
        match self.inbox.is_late(bound) {
            true => Err(format!(
                "the peer has sent a part of a frame and not the rest within {} ms; {setting} \
                 bounds this",
                bound.as_millis()
            )),
            false => Ok(()),
        }
    }
}

/// Waits until the peer has sent something on one of `sessions`, at most `wait`, and marks those.
/// Sessions beyond [`MAX_HEARD`] have to wait until one before them is gone.
pub(super) fn wait_readable(
    sessions: &[Session],
    wait: Duration,
    readable: &mut Vec<bool>,
) -> std::io::Result<()> {
    readable.clear();
    let wait = Timespec::try_from(wait).map_err(std::io::Error::other)?;
    let Some(last) = sessions.len().checked_sub(1) else { return Ok(()) };
    // Not a list: this runs all the time, and a fetch must not share the allocator with it. Places
    // that are too many name the last session again, and are not looked at.
    let mut fds: [_; MAX_HEARD] = std::array::from_fn(|at| {
        PollFd::from_borrowed_fd(sessions[at.min(last)].socket.as_fd(), PollFlags::IN)
    });
    let fds = &mut fds[..sessions.len().min(MAX_HEARD)];
    match poll(fds, Some(&wait)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    readable.extend(fds.iter().map(|fd| !fd.revents().is_empty()));
    Ok(())
}
