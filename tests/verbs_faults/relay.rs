//! Somebody between a client and a real peer who changes what they say on the control connection.

use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use expert_tier::wire::frame::{FrameHeader, FrameType, Status};
use expert_tier::wire::handshake::encode_frame;
use expert_tier::wire::io::{Clock, read_frame, write_all};
use railset::table::{LayerTable, Table};

use crate::peer_support::scripted::Scripted;

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);
/// Room for any frame of a test's store.
const MOST_BYTES: u64 = 8 << 20;

/// A frame's type and body.
pub(crate) type Frame = (FrameType, Vec<u8>);

/// What the relay makes of a frame: bytes to send on, perhaps none.
pub(crate) fn unchanged((frame, body): Frame) -> Vec<u8> {
    encode_frame(frame, Status::Ok, &body)
}

/// A relay to `peer`; `to_client` and `to_peer` say what becomes of each frame. The number counts
/// connections from 0.
pub(crate) fn start(
    peer: String,
    to_client: impl Fn(usize, Frame) -> Vec<u8> + Send + Sync + 'static,
    to_peer: impl Fn(usize, Frame) -> Vec<u8> + Send + Sync + 'static,
) -> Scripted {
    towards(move |_| peer.clone(), to_client, to_peer)
}

/// A relay to whichever peer `which` says for a connection.
pub(crate) fn towards(
    which: impl Fn(usize) -> String + Send + Sync + 'static,
    to_client: impl Fn(usize, Frame) -> Vec<u8> + Send + Sync + 'static,
    to_peer: impl Fn(usize, Frame) -> Vec<u8> + Send + Sync + 'static,
) -> Scripted {
    Scripted::start(move |conn| {
        let peer = TcpStream::connect(which(conn.nth))?;
        let client = conn.socket.try_clone()?;
        std::thread::scope(|scope| {
            let (theirs, ours) = (client.try_clone()?, peer.try_clone()?);
            scope.spawn(|| pass(theirs, ours, |frame| to_peer(conn.nth, frame)));
            pass(peer, client, |frame| to_client(conn.nth, frame));
            Ok(())
        })
    })
}

/// Passes frames on until one end leaves, and ends both.
fn pass(mut from: TcpStream, mut to: TcpStream, change: impl Fn(Frame) -> Vec<u8>) {
    let clock = Clock::start(LONG, "a test");
    while let Ok((header, body)) = read_frame(&mut from, MOST_BYTES, &clock) {
        let FrameHeader { frame, status, .. } = header;
        // A refusal's status is part of what it says; the others have none.
        let bytes = match status {
            Status::Ok => change((frame, body)),
            status => encode_frame(frame, status, &body),
        };
        if write_all(&mut to, &bytes, &clock).is_err() {
            break;
        }
    }
    // Either may have left already.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// The frame of a table whose layers went through `change`, with its generation raised by `later`.
pub(crate) fn changed_table(body: &[u8], later: u64, change: impl Fn(&mut LayerTable)) -> Vec<u8> {
    let table = Table::decode(body).expect("a real peer's table");
    let mut layers = table.layers().to_vec();
    layers.iter_mut().for_each(change);
    let table = Table::new(table.generation() + later, layers).expect("within the limits");
    encode_frame(FrameType::RailsTable, Status::Ok, &table.encode())
}
