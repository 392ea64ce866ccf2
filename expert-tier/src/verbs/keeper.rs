//! The thread that connects to the peer, listens to it, and looks after the rails where no caller
//! does.
//!
//! A session is a control connection and the rails that were agreed on over it. The peer's end of
//! the rails goes with the connection, so when that ends the rails are ended at once, and so is the
//! connection when the last rail is lost: the next session begins from nothing, with the table and
//! the keys that the peer has then.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::env;
use gpu_sys::verbs::AsyncEvent;
use railset::Backoff;
use railset::driver;
use railset::handshake::client::{ClientAction, ClientRails, ClientSettings};
use railset::message::Kind;
use railset::table::{CheckedTable, LayerShape};
use rand::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::OpenError;
use super::desk::{Desk, PartChecker};
use super::devices::Device;
use super::rail::{PreparedRail, Rail};
use crate::layout::ExpertLayout;
use crate::tcp::{DialError, Dialler};
use crate::wire::frame::{FrameType, Status};
use crate::wire::handshake::{Goal, encode_frame};
use crate::wire::io::{Clock, read_frame, write_all};

/// How long the keeper waits for the peer while READs fly that no caller looks after.
const FLYING_TICK: Duration = Duration::from_millis(1);
/// How long it waits while nothing flies, or a caller looks after what does.
const IDLE_TICK: Duration = Duration::from_millis(20);
/// Largest table that is taken from a peer, in bytes of its body.
const MAX_FRAME_BYTES: u64 = 64 << 20;

/// A control connection whose rails are up.
pub(super) struct Session {
    socket: TcpStream,
    machine: ClientRails,
}

/// What a session begins with.
pub(super) struct Opened {
    pub(super) session: Session,
    pub(super) rails: Vec<Rail>,
    pub(super) table: Arc<CheckedTable>,
}

/// Runs until the backend is closed.
pub(super) fn run(desk: &Arc<Desk>, dialler: &Dialler, checker: &PartChecker, first: Session) {
    let mut backoff = Backoff::new(desk.options.backoff);
    let mut session = Some(first);
    loop {
        let Some(current) = session.take() else {
            match redial(desk, dialler) {
                Ok(opened) => {
                    desk.count_reconnect();
                    desk.session_up(opened.rails, opened.table);
                    session = Some(opened.session);
                }
                Err(error) => {
                    desk.dial_failed(&error.to_string());
                    if desk.pause(backoff.failed(rand::rng().next_u32())) {
                        return;
                    }
                }
            }
            continue;
        };
        let started = Instant::now();
        let why = keep(desk, checker, current);
        desk.end_rails(&why);
        while desk.reap() > 0 {
            desk.drive(checker);
            while checker.help() {}
            desk.nap(FLYING_TICK);
        }
        if desk.closing() {
            return;
        }
        // A peer that accepts and breaks at once must not be dialled in a tight loop.
        if started.elapsed() > desk.options.deadline {
            backoff.succeeded();
        }
        if desk.pause(backoff.failed(rand::rng().next_u32())) {
            return;
        }
    }
}

fn redial(desk: &Arc<Desk>, dialler: &Dialler) -> Result<Opened, OpenError> {
    let goal = Goal::Resume(Arc::clone(&desk.manifest));
    let socket = dialler.dial_unless(&|| desk.closing(), goal)?;
    open(desk, socket)
}

/// Agrees with the peer on rails over `socket`, which is attached.
pub(super) fn open(desk: &Desk, mut socket: TcpStream) -> Result<Opened, OpenError> {
    let options = &desk.options;
    let clock = Clock::start(options.connect, env::EXPERT_CONNECT_MS.name);
    let settings = ClientSettings {
        wishes: options.wishes.clone(),
        queue_pairs: options.queue_pairs,
        depth: u8::MAX,
    };
    let peer = || options.peer.clone();
    let io = |source| OpenError::Dial(DialError::Io { peer: peer(), source });
    let (mut machine, first) = ClientRails::start(settings, shapes(desk.manifest.layout()));
    let mut actions = VecDeque::from([first]);
    let (mut prepared, mut rails) = (Vec::new(), Vec::new());
    loop {
        let Some(action) = actions.pop_front() else {
            let (header, body) = read_frame(&mut socket, MAX_FRAME_BYTES, &clock).map_err(io)?;
            let kind = rails_kind(header.frame, header.status, &body)
                .map_err(|reason| OpenError::Refused { peer: peer(), reason })?;
            actions.extend(machine.on_message(kind, &body).map_err(|e| agree(options, e))?);
            continue;
        };
        let more = match action {
            ClientAction::Send(kind, body) => {
                let bytes = encode_frame(kind.into(), Status::Ok, &body);
                write_all(&mut socket, &bytes, &clock).map_err(io)?;
                Vec::new()
            }
            ClientAction::FindRoutes(gids) => {
                let facts = desk.devices.facts()?;
                let sources: Vec<_> = gids.iter().map(driver::source_towards).collect();
                machine.on_routes(&facts, &sources).map_err(|e| agree(options, e))?
            }
            ClientAction::CreateQueuePairs(creates) => {
                for create in &creates {
                    let device = desk.devices.device(&create.local.device)?;
                    let (count, depth) = (create.queue_pairs, options.queue_pair_depth);
                    prepared.push(PreparedRail::new(&create.local, device, count, depth)?);
                }
                let ends: Result<Vec<_>, _> = prepared.iter().map(PreparedRail::ends).collect();
                let ends = ends.map_err(|source| OpenError::QueuePair { source })?;
                for rail in machine.rails() {
                    tracing::info!(peer = %options.peer, "rail {}", rail.pair);
                }
                machine.on_created(&ends).map_err(|e| agree(options, e))?
            }
            ClientAction::ConnectQueuePairs(ups) => {
                for (position, (rail, up)) in prepared.drain(..).zip(&ups).enumerate() {
                    rails.push(rail.connect(position, up)?);
                }
                machine.on_up().map_err(|e| agree(options, e))?
            }
            ClientAction::Ready(table) => {
                // What follows is the acknowledgement, which the peer waits for.
                for rest in actions.drain(..) {
                    if let ClientAction::Send(kind, body) = rest {
                        let bytes = encode_frame(kind.into(), Status::Ok, &body);
                        write_all(&mut socket, &bytes, &clock).map_err(io)?;
                    }
                }
                let session = Session { socket, machine };
                return Ok(Opened { session, rails, table });
            }
            ClientAction::TableChanged(_) => Vec::new(),
        };
        for action in more.into_iter().rev() {
            actions.push_front(action);
        }
    }
}

fn agree(options: &super::VerbsOptions, source: railset::handshake::HandshakeError) -> OpenError {
    OpenError::Agree { peer: options.peer.clone(), source: Box::new(source) }
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
    let shape = |layer: &crate::layout::LayerLayout| LayerShape {
        layer: layer.layer(),
        experts: layer.experts(),
        record_bytes: layer.record_bytes(),
    };
    layout.layers().iter().map(shape).collect()
}

/// Looks after a session until it ends, and says why it did.
fn keep(desk: &Arc<Desk>, checker: &PartChecker, mut session: Session) -> String {
    let devices = desk.rail_devices();
    loop {
        if desk.closing() {
            return "the backend is closed".into();
        }
        let alone = !desk.is_idle() && !desk.is_driven();
        let tick = if alone { FLYING_TICK } else { IDLE_TICK };
        match readable(&session.socket, tick) {
            Ok(true) => {
                if let Err(why) = hear(desk, &mut session) {
                    return why;
                }
            }
            Ok(false) => {}
            Err(error) => return format!("the control connection failed: {error}"),
        }
        look_at_events(desk, &devices);
        if !desk.is_driven() {
            desk.drive(checker);
            while checker.help() {}
        }
        desk.expire();
        if desk.reap() == 0 {
            return desk.down_why();
        }
    }
}

/// Whether the peer has sent something, within `wait`.
fn readable(socket: &TcpStream, wait: Duration) -> std::io::Result<bool> {
    let wait = Timespec::try_from(wait).map_err(std::io::Error::other)?;
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    match poll(&mut fds, Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes one frame of the peer's; an error ends the session.
fn hear(desk: &Desk, session: &mut Session) -> Result<(), String> {
    let clock = Clock::start(desk.options.deadline, env::EXPERT_DEADLINE_MS.name);
    let socket = &mut session.socket;
    let (header, body) =
        read_frame(socket, MAX_FRAME_BYTES, &clock).map_err(|error| error.to_string())?;
    if header.frame == FrameType::Drain {
        // READs go on until the peer closes.
        tracing::info!(peer = %desk.options.peer, "the peer is shutting down");
        return Ok(());
    }
    let kind = rails_kind(header.frame, header.status, &body)?;
    let actions = session.machine.on_message(kind, &body).map_err(|error| error.to_string())?;
    for action in actions {
        match action {
            ClientAction::TableChanged(table) => desk.table_changed(table),
            ClientAction::Send(kind, body) => {
                let bytes = encode_frame(kind.into(), Status::Ok, &body);
                write_all(socket, &bytes, &clock).map_err(|error| error.to_string())?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Ends the rails whose device or port has said that it is down.
fn look_at_events(desk: &Desk, devices: &[Arc<Device>]) {
    for device in devices {
        while let Ok(Some(event)) = device.context().next_event() {
            tracing::info!(device = device.name(), ?event, "the device says");
            let on_device = |rail: &Rail| rail.device().name() == device.name();
            match event {
                // What was said before this session, or of a moment that has passed, is no news.
                AsyncEvent::PortError { port } if !device.is_active(port) => {
                    desk.end_rails_where(|r| on_device(r) && r.port() == port, "its port is down");
                }
                AsyncEvent::DeviceFatal => desk.end_rails_where(on_device, "the device failed"),
                _ => {}
            }
        }
    }
}
