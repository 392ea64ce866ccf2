//! Who is connected, and how many may be.
//!
//! A client is everything that shares one client id; it may hold several connections. Limits:
//! clients that have attached, connections per client, and connections that have not attached
//! yet. The last is `max_clients x UNATTACHED_PER_CLIENT + UNATTACHED_STRANGERS`: all clients of a
//! peer that was restarted may come back at once. Beyond it a newcomer takes the place of the
//! connection that has been shaking hands for longest: a client needs a moment for that, so
//! strangers who say nothing cannot keep clients out.

use std::collections::{BTreeMap, HashMap};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::gauge;

/// Connections that one client may hold.
const MAX_CONNECTIONS_PER_CLIENT: usize = expert_tier::tcp::MAX_STREAMS as usize;
/// Connections of each client allowed that may be shaking hands at once: its streams, by default.
const UNATTACHED_PER_CLIENT: usize = 2;
/// Connections besides those that may be there without having attached: status requests, and
/// whoever else knocks.
const UNATTACHED_STRANGERS: usize = 64;

/// Names a connection while it is registered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ConnectionId(u64);

/// Why a connection is not let in.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Full {
    #[error("{0} connections are here that ask for no records, as many as allowed")]
    Unattached(usize),
    #[error("{0} clients are attached already; --max-clients is the limit")]
    Clients(usize),
    #[error("this client has {0} connections already")]
    Connections(usize),
}

/// All connections of a peer.
pub(crate) struct Registry {
    max_clients: usize,
    state: Mutex<State>,
    /// Rung when a connection leaves.
    left: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    /// In order of arrival.
    connections: BTreeMap<ConnectionId, Entry>,
    /// Attached connections of each client.
    clients: HashMap<[u8; 16], usize>,
}

struct Entry {
    socket: TcpStream,
    stage: Stage,
}

/// How far a connection has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeting,
    Welcomed,
    Attached([u8; 16]),
}

impl Entry {
    fn cut(&self) {
        if let Err(error) = self.socket.shutdown(Shutdown::Both) {
            tracing::debug!(%error, "shutdown of a connection that had ended");
        }
    }
}

/// A connection's place in the registry; dropping it gives the place up.
pub(crate) struct Place {
    registry: Arc<Registry>,
    id: ConnectionId,
}

impl Registry {
    pub(crate) fn new(max_clients: usize) -> Arc<Self> {
        Arc::new(Self { max_clients, state: Mutex::default(), left: Condvar::new() })
    }

    /// Lets a new connection in, before anything is known of it.
    pub(crate) fn enter(self: &Arc<Self>, socket: TcpStream) -> Result<Place, Full> {
        let mut state = self.lock();
        let attached: usize = state.clients.values().sum();
        let unattached = state.connections.len() - attached;
        if unattached >= self.max_unattached() && !state.evict_oldest_greeting() {
            return Err(Full::Unattached(unattached));
        }
        let id = ConnectionId(state.next);
        state.next += 1;
        state.connections.insert(id, Entry { socket, stage: Stage::Greeting });
        state.publish();
        Ok(Place { registry: Arc::clone(self), id })
    }

    fn max_unattached(&self) -> usize {
        self.max_clients * UNATTACHED_PER_CLIENT + UNATTACHED_STRANGERS
    }

    /// Clients attached and connections open.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.clients.len(), state.connections.len())
    }

    /// Waits until no connection is left, at most `wait`; says how many are.
    pub(crate) fn wait_empty(&self, wait: Duration) -> usize {
        let state = self.lock();
        let waited =
            self.left.wait_timeout_while(state, wait, |state| !state.connections.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.connections.len()
    }

    /// Ends every connection that is left.
    pub(crate) fn cut_all(&self) {
        self.lock().connections.values().for_each(Entry::cut);
    }

    /// Both maps change together under this lock and nothing in between can panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// The handshake is over: nobody takes this place any more.
    pub(crate) fn welcomed(&self) {
        if let Some(entry) = self.registry.lock().connections.get_mut(&self.id) {
            entry.stage = Stage::Welcomed;
        }
    }

    /// Counts the connection as one of client `client`.
    pub(crate) fn attach(&self, client: [u8; 16]) -> Result<(), Full> {
        let mut state = self.registry.lock();
        // Attaching again changes nothing, whatever the limits are by now.
        let stage = state.connections.get(&self.id).map(|entry| entry.stage);
        if stage == Some(Stage::Attached(client)) {
            return Ok(());
        }
        let known = state.clients.get(&client).copied();
        match known {
            None if state.clients.len() >= self.registry.max_clients => {
                return Err(Full::Clients(state.clients.len()));
            }
            Some(count) if count >= MAX_CONNECTIONS_PER_CLIENT => {
                return Err(Full::Connections(count));
            }
            _ => {}
        }
        let Some(entry) = state.connections.get_mut(&self.id) else { return Ok(()) };
        let before = std::mem::replace(&mut entry.stage, Stage::Attached(client));
        if !matches!(before, Stage::Attached(_)) {
            *state.clients.entry(client).or_insert(0) += 1;
        }
        state.publish();
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        let stage = state.connections.remove(&self.id).map(|entry| entry.stage);
        if let Some(Stage::Attached(client)) = stage
            && let Some(count) = state.clients.get_mut(&client)
        {
            *count -= 1;
            if *count == 0 {
                state.clients.remove(&client);
            }
        }
        state.publish();
        drop(state);
        self.registry.left.notify_all();
    }
}

impl State {
    /// Cuts the connection that has been shaking hands for longest; false where none is.
    fn evict_oldest_greeting(&mut self) -> bool {
        let greeting =
            |(id, entry): (&ConnectionId, &Entry)| (entry.stage == Stage::Greeting).then_some(*id);
        let Some(oldest) = self.connections.iter().find_map(greeting) else { return false };
        if let Some(entry) = self.connections.remove(&oldest) {
            entry.cut();
        }
        true
    }

    fn publish(&self) {
        // Counts are bounded by the limits above, far below 2^52.
        gauge!("metrale_peer_clients").set(self.clients.len() as f64);
        gauge!("metrale_peer_connections").set(self.connections.len() as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn socket() -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    #[test]
    fn clients_are_counted_by_id_and_leave_with_their_last_connection() {
        let registry = Registry::new(1);
        let (a, b) = (registry.enter(socket()).unwrap(), registry.enter(socket()).unwrap());
        a.attach([1; 16]).unwrap();
        b.attach([1; 16]).unwrap();
        let c = registry.enter(socket()).unwrap();
        assert_eq!(c.attach([2; 16]), Err(Full::Clients(1)));
        drop(a);
        assert_eq!(c.attach([2; 16]), Err(Full::Clients(1)));
        drop(b);
        assert_eq!(c.attach([2; 16]), Ok(()));
        assert_eq!(c.attach([2; 16]), Ok(()), "once more, with every place taken");
        assert_eq!(registry.counts(), (1, 1));
        drop(c);
        assert_eq!(registry.counts(), (0, 0));
        assert_eq!(registry.wait_empty(Duration::ZERO), 0);
    }

    #[test]
    fn strangers_who_say_nothing_make_room_for_whoever_comes() {
        let registry = Registry::new(1);
        let client = registry.enter(socket()).unwrap();
        client.attach([1; 16]).unwrap();
        let most = registry.max_unattached();
        let strangers: Vec<_> = (0..most).map(|_| registry.enter(socket()).unwrap()).collect();
        let newcomer = registry.enter(socket()).expect("the oldest stranger's place");
        assert_eq!(registry.counts(), (1, most + 1));
        newcomer.attach([1; 16]).unwrap();
        drop(strangers);
        assert_eq!(registry.counts(), (1, 2));
    }

    #[test]
    fn connections_that_have_shaken_hands_are_not_cut_and_have_a_limit() {
        let registry = Registry::new(1);
        let most = registry.max_unattached();
        let idle: Vec<_> = (0..most).map(|_| registry.enter(socket()).unwrap()).collect();
        idle.iter().for_each(Place::welcomed);
        assert_eq!(registry.enter(socket()).err(), Some(Full::Unattached(most)));
        drop(idle);
        assert!(registry.enter(socket()).is_ok());
    }
}
