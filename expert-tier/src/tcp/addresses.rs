//! The peer's addresses: looked up within a bound, and kept.
//!
//! The system's look-up takes no timeout and cannot be given up, so it runs on a thread of its
//! own. Whoever waits for it leaves when its own bound is over, and the next one waits for the
//! same look-up instead of starting another: a name server that never answers costs one thread.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::dial::DialError;
use crate::wire::io::{Clock, IoError};

/// Most addresses of one host that are tried.
const MOST: usize = 8;

type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// What is known of a peer's addresses; clones share it.
#[derive(Clone)]
pub(super) struct Addresses(Arc<Shared>);

struct Shared {
    look_up: Box<LookUp>,
    state: Mutex<State>,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    asking: bool,
    /// The last answer; an error as kind and text, for more than one may have waited for it.
    answer: Option<Result<Vec<SocketAddr>, (io::ErrorKind, String)>>,
}

impl Addresses {
    /// Addresses that the system looks up.
    pub(super) fn of_the_system() -> Self {
        Self::by(look_up)
    }

    fn by(look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        let (look_up, state) = (Box::new(look_up), Mutex::default());
        Self(Arc::new(Shared { look_up, state, answered: Condvar::new() }))
    }

    /// The addresses of `peer`, the same peer for each call: those found before, or a new answer.
    pub(super) fn find(&self, peer: &str, clock: &Clock<'_>) -> Result<Vec<SocketAddr>, DialError> {
        if let Ok(address) = peer.parse() {
            return Ok(vec![address]);
        }
        let mut state = self.lock();
        if let Some(Ok(known)) = &state.answer {
            return Ok(known.clone());
        }
        if !state.asking {
            self.ask(peer, &mut state)?;
        }
        let failed = |source| DialError::Resolve { peer: peer.to_owned(), source };
        while state.asking {
            let slice = clock.slice().map_err(|error| match error {
                IoError::Stopped => DialError::Io { peer: peer.to_owned(), source: error },
                late => failed(io::Error::new(io::ErrorKind::TimedOut, late.to_string())),
            })?;
            let woken = self.0.answered.wait_timeout(state, slice);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        match &state.answer {
            Some(Ok(found)) => Ok(found.clone()),
            Some(Err((kind, text))) => Err(failed(io::Error::new(*kind, text.clone()))),
            None => Err(failed(io::Error::other("the look-up ended without an answer"))),
        }
    }

    /// What was found leads nowhere: the next call looks it up again.
    pub(super) fn forget(&self) {
        self.lock().answer = None;
    }

    fn ask(&self, peer: &str, state: &mut State) -> Result<(), DialError> {
        let (asking, name) = (Asking(self.clone()), peer.to_owned());
        state.answer = None;
        let spawned = std::thread::Builder::new().name("look-up".into()).spawn(move || {
            let answer = (asking.0.0.look_up)(&name);
            asking.0.lock().answer =
                Some(answer.map_err(|error| (error.kind(), error.to_string())));
        });
        spawned
            .map_err(|source| DialError::Thread { what: "look up the peer's address", source })?;
        state.asking = true;
        Ok(())
    }

    /// Every change under this lock is one assignment, so a poisoned one guards sound data.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The addresses of `peer`, `HOST:PORT`, at most eight of them.
///
/// A host may be an IPv6 address with its zone, `[fe80::1%eth0]:9909` (RFC 4007, section 11): the
/// system's resolver knows interfaces by name.
///
/// # Errors
/// The text has no port, or the resolver knows no such host.
pub fn look_up(peer: &str) -> io::Result<Vec<SocketAddr>> {
    if let Some((host, port)) = zoned(peer) {
        return Ok((host, port).to_socket_addrs()?.take(MOST).collect());
    }
    Ok(peer.to_socket_addrs()?.take(MOST).collect())
}

/// Address and port of `[ADDRESS%ZONE]:PORT`, the form that the standard library does not split.
fn zoned(peer: &str) -> Option<(&str, u16)> {
    let (host, port) = peer.strip_prefix('[')?.split_once("]:")?;
    let port = port.parse().ok()?;
    host.contains('%').then_some((host, port))
}

/// Ends the wait for a look-up however it ends.
struct Asking(Addresses);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.lock().asking = false;
        self.0.0.answered.notify_all();
    }
}

impl fmt::Debug for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Addresses").field(&self.lock().answer).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::*;

    const BOUND: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(20);

    fn clock(bound: Duration) -> Clock<'static> {
        Clock::start(bound, "A_SETTING")
    }

    #[test]
    fn a_look_up_that_hangs_costs_its_bound_and_one_thread() {
        let asked = Arc::new(AtomicUsize::new(0));
        let (go, wait) = channel::<()>();
        let (count, wait) = (Arc::clone(&asked), Mutex::new(wait));
        let addresses = Addresses::by(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            let _told = wait.lock().unwrap().recv_timeout(LONG);
            Ok(vec![SocketAddr::from(([127, 0, 0, 1], 9))])
        });
        for _ in 0..3 {
            let start = Instant::now();
            let error = addresses.find("host:9", &clock(BOUND)).unwrap_err().to_string();
            assert!(error.contains("100 ms") && error.contains("A_SETTING"), "{error}");
            assert!(start.elapsed() >= BOUND && start.elapsed() < LONG / 2);
        }
        go.send(()).unwrap();
        // The answer that nobody had the patience for is there for the next one.
        assert_eq!(addresses.find("host:9", &clock(LONG)).unwrap()[0].port(), 9);
        assert_eq!(addresses.find("host:9", &clock(LONG)).unwrap()[0].port(), 9);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_link_local_address_takes_its_interface_by_name_and_by_number() {
        // Interface 1 is the loopback in every network namespace.
        for text in ["[fe80::1%lo]:9909", "[fe80::1%1]:9909"] {
            let found = look_up(text).unwrap();
            let SocketAddr::V6(address) = found[0] else { panic!("{text}: {found:?}") };
            assert_eq!((address.scope_id(), address.port()), (1, 9909), "{text}");
        }
        for text in ["[fe80::1%nosuch0]:9909", "[fe80::1%lo]", "[fe80::1%lo]:x"] {
            assert!(look_up(text).is_err(), "{text}");
        }
    }

    #[test]
    fn whoever_no_longer_wants_an_address_does_not_wait_for_it() {
        let (go, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let addresses = Addresses::by(move |_| {
            let _told = wait.lock().unwrap().recv_timeout(LONG);
            Ok(Vec::new())
        });
        let start = Instant::now();
        let stopped = || start.elapsed() > BOUND;
        let error = addresses.find("host:9", &clock(LONG).or_when(&stopped)).unwrap_err();
        assert!(matches!(error, DialError::Io { source: IoError::Stopped, .. }), "{error}");
        assert!(start.elapsed() < LONG / 2);
        drop(go);
    }

    #[test]
    fn what_was_found_is_kept_until_it_leads_nowhere_and_a_failure_is_not_kept() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let addresses = Addresses::by(move |_| match count.fetch_add(1, Ordering::Relaxed) {
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "no such host")),
            n => Ok(vec![SocketAddr::from(([127, 0, 0, 1], n as u16))]),
        });
        let port = || addresses.find("host:9", &clock(LONG)).map(|found| found[0].port());
        assert!(port().unwrap_err().to_string().contains("no such host"));
        assert_eq!((port().unwrap(), port().unwrap()), (1, 1));
        addresses.forget();
        assert_eq!(port().unwrap(), 2);
        // A number needs nobody's answer.
        addresses.find("127.0.0.1:9", &clock(LONG)).unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }
}
