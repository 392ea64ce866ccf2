//! The thread that listens to the peer and to the devices, and looks after the rails where no caller
//! does. It waits for no peer: rails that are missing are set up by other threads (`connector.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::verbs::AsyncEvent;
use railset::message::Kind;

use super::desk::{Desk, PartChecker};
use super::devices::Device;
use super::rail::Rail;
use super::session::{self, Session};

/// How long the keeper waits for the peer while READs fly that no caller looks after.
const FLYING_TICK: Duration = Duration::from_millis(1);
/// How long it waits while nothing flies, or a caller looks after what does.
const IDLE_TICK: Duration = Duration::from_millis(20);
/// How often the peer is told which records are read.
const USAGE_INTERVAL: Duration = Duration::from_millis(250);

/// Looks after rails and control connections until the backend is closed.
pub(super) fn keep(desk: &Arc<Desk>, checker: &PartChecker) {
    let (mut sessions, mut readable) = (Vec::<Session>::new(), Vec::new());
    let mut devices = Vec::new();
    let mut told = Instant::now();
    while !desk.closing() {
        desk.take_sessions(&mut sessions);
        let alone = !desk.is_idle() && !desk.is_driven();
        let tick = if alone { FLYING_TICK } else { IDLE_TICK };
        listen(desk, &mut sessions, tick, &mut readable);
        look_at_events(desk, &mut devices);
        if !desk.is_driven() {
            desk.drive(checker);
            while checker.help() {}
        }
        desk.expire();
        desk.reap();
        report(desk, &sessions, &mut told);
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

/// Takes what the peer has sent within `tick`, and waits for nothing beyond it; a session that breaks
/// ends its rail.
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
        let is_heard = match heard.next().copied().unwrap_or(false) {
            true => session.hear(desk),
            false => Ok(()),
        };
        match is_heard.and_then(|()| session.check_time(desk)) {
            Ok(()) => true,
            Err(why) => {
                desk.end_rails_where(|rail| rail.number == session.rail, &why);
                false
            }
        }
    });
}

/// Tells the peer what was damaged, and, where it holds only some records in memory, now and then
/// which of those are read. What does not get there is no loss, but its connection is.
fn report(desk: &Desk, sessions: &[Session], told: &mut Instant) {
    let Some(session) = sessions.first() else { return };
    let say = |kind, body: &[u8]| {
        if let Err(why) = session.say(kind, body) {
            desk.end_rails_where(|rail| rail.number == session.rail, &why);
        }
    };
    for damaged in desk.reports.take_damaged() {
        say(Kind::Damaged, &damaged.encode());
    }
    if told.elapsed() < USAGE_INTERVAL || !desk.spills() {
        return;
    }
    *told = Instant::now();
    if let Some(usage) = desk.reports.take_usage(&desk.manifest) {
        say(Kind::Usage, &usage.encode());
    }
}

/// Ends the rails whose device or port has said that it is down. A device that has no rail is heard as
/// well: after it has failed, the next rail needs it opened anew.
fn look_at_events(desk: &Desk, devices: &mut Vec<Arc<Device>>) {
    desk.rail_devices(devices);
    desk.devices.add_opened(devices);
    for device in devices {
        while let Ok(Some(event)) = device.context().next_event() {
            tracing::info!(device = device.name(), ?event, "the device says");
            let on_device = |rail: &Rail| Arc::ptr_eq(rail.device(), device);
            match event {
                // What was said of a moment that has passed is no news.
                AsyncEvent::PortError { port } if !device.is_active(port) => {
                    desk.end_rails_where(|r| on_device(r) && r.port() == port, "its port is down");
                }
                AsyncEvent::DeviceFatal => {
                    desk.end_rails_where(on_device, "the device failed");
                    // Nothing comes of this opening of it any more, even when it has been reset.
                    desk.devices.forget(device);
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
#[path = "chaos_tests.rs"]
mod chaos;
#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
