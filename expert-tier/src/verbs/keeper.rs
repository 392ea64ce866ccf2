//! The two threads of the backend.
//!
//! The keeper listens to the peer and to the devices, and looks after the rails where no caller
//! does. The connector sets up rails that are missing, each attempt within its bound and with a
//! back-off of its own; it waits for the peer, so it must not be the one that looks after the rails
//! that work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::verbs::AsyncEvent;
use railset::Backoff;
use railset::handshake::client::Carry;
use rand::Rng;

use super::desk::{Desk, Need, PartChecker};
use super::rail::Rail;
use super::session::{self, Session};
use crate::tcp::Dialler;

/// How long the keeper waits for the peer while READs fly that no caller looks after.
const FLYING_TICK: Duration = Duration::from_millis(1);
/// How long it waits while nothing flies, or a caller looks after what does.
const IDLE_TICK: Duration = Duration::from_millis(20);
/// How often the connector looks whether a rail is missing.
const LOOK: Duration = Duration::from_millis(20);

/// Looks after rails and control connections until the backend is closed.
pub(super) fn keep(desk: &Arc<Desk>, checker: &PartChecker) {
    let (mut sessions, mut readable) = (Vec::<Session>::new(), Vec::new());
    while !desk.closing() {
        desk.take_sessions(&mut sessions);
        let alone = !desk.is_idle() && !desk.is_driven();
        let tick = if alone { FLYING_TICK } else { IDLE_TICK };
        listen(desk, &mut sessions, tick, &mut readable);
        look_at_events(desk);
        if !desk.is_driven() {
            desk.drive(checker);
            while checker.help() {}
        }
        desk.expire();
        desk.reap();
        // A rail that is gone takes its connection along, and so what the peer has of it.
        sessions.retain(|session| desk.has_rail(session.rail));
    }
    desk.end_rails_where(|_| true, "the backend is closed");
    while desk.reap() > 0 {
        desk.drive(checker);
        while checker.help() {}
        desk.nap(FLYING_TICK);
    }
}

/// Takes what the peer has sent within `tick`; a session that breaks ends its rail.
fn listen(desk: &Desk, sessions: &mut Vec<Session>, tick: Duration, readable: &mut Vec<bool>) {
    if sessions.is_empty() {
        return desk.nap(tick);
    }
    if let Err(error) = session::wait_readable(sessions, tick, readable) {
        tracing::error!(%error, "cannot wait for the peer");
        return desk.nap(tick);
    }
    let mut heard = readable.iter();
    sessions.retain_mut(|session| {
        if !heard.next().copied().unwrap_or(false) {
            return true;
        }
        match session.hear(desk) {
            Ok(()) => true,
            Err(why) => {
                desk.end_rails_where(|rail| rail.number == session.rail, &why);
                false
            }
        }
    });
}

/// Ends the rails whose device or port has said that it is down.
fn look_at_events(desk: &Desk) {
    let mut devices = Vec::new();
    desk.each_rail(|rail| devices.push(Arc::clone(rail.device())));
    for device in devices {
        while let Ok(Some(event)) = device.context().next_event() {
            tracing::info!(device = device.name(), ?event, "the device says");
            let on_device = |rail: &Rail| rail.device().name() == device.name();
            match event {
                AsyncEvent::PortError { port } => {
                    desk.end_rails_where(|r| on_device(r) && r.port() == port, "its port is down");
                }
                AsyncEvent::DeviceFatal => desk.end_rails_where(on_device, "the device failed"),
                _ => {}
            }
        }
    }
}

/// The attempts at one rail.
struct Attempts {
    backoff: Backoff,
    due: Instant,
    /// When the last one succeeded.
    up_since: Option<Instant>,
    /// Why the last one failed; logged when it changes.
    why: String,
}

/// Sets up rails that are missing, until the backend is closed.
pub(super) fn connect(desk: &Arc<Desk>, dialler: &Dialler) {
    let new = || Attempts {
        backoff: Backoff::new(desk.options.backoff),
        due: Instant::now(),
        up_since: Some(Instant::now()),
        why: String::new(),
    };
    let mut slots = [new(), new()];
    while !desk.closing() {
        let Some(Need { slot, carry }) = desk.need() else {
            desk.pause(LOOK);
            continue;
        };
        let attempts = &mut slots[slot];
        if let Some(since) = attempts.up_since.take() {
            // One that broke at once must not be set up in a tight loop.
            if since.elapsed() > desk.options.deadline {
                attempts.backoff.succeeded();
            }
            attempts.due = Instant::now() + attempts.backoff.failed(rand::rng().next_u32());
        }
        let wait = attempts.due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            desk.pause(wait.min(LOOK));
            continue;
        }
        try_once(desk, dialler, carry, slot, attempts);
    }
}

fn try_once(
    desk: &Arc<Desk>,
    dialler: &Dialler,
    carry: Carry,
    slot: usize,
    attempts: &mut Attempts,
) {
    match session::dial(desk, dialler, carry, slot) {
        Ok(opened) => {
            attempts.up_since = Some(Instant::now());
            attempts.why.clear();
            desk.count_reconnect();
            desk.rail_up(opened);
        }
        Err(error) => {
            let why = error.to_string();
            if why != attempts.why {
                tracing::warn!(peer = %desk.options.peer, rail = slot, reason = why,
                    "no rail; trying again");
            }
            attempts.due = Instant::now() + attempts.backoff.failed(rand::rng().next_u32());
            desk.dial_failed(&why);
            attempts.why = why;
        }
    }
}
