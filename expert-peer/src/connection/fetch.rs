//! Answering requests for records, from the page cache.

use std::sync::atomic::Ordering;
use std::time::Instant;

use expert_tier::key::ExpertKey;
use expert_tier::wire::frame::{FrameHeader, FrameType, HEADER_BYTES, Status};
use expert_tier::wire::handshake::clip;
use expert_tier::wire::message::{FETCH_BYTES, decode_fetch};
use metrics::counter;

#[cfg(metrale_rdma_verbs)]
use super::direct;
use super::send::{send_all, wait_for_room};
use super::{BUFFER_BYTES, Connection, End};
use crate::sendfile::{Whose, whose};

/// Bytes of a larger record that are read before its length is promised.
const FIRST_BYTES: usize = 64 * 1024;
/// Most bytes that one `sendfile` is asked for: bounds the time between looks at its result.
const SEND_BYTES: usize = 4 << 20;
impl Connection {
    pub(super) fn fetch(&mut self, header: &FrameHeader) -> Result<(), End> {
        let start = Instant::now();
        let mut body = [0; FETCH_BYTES];
        self.read_rest(&mut body)?;
        let key = decode_fetch(&body);
        let record_bytes = match self.shared.store.manifest().layout().locate(key) {
            Ok(layer) => layer.record_bytes(),
            Err(error) => return self.answer_error(header, Status::NoSuchKey, &error.to_string()),
        };
        #[cfg(metrale_rdma_verbs)]
        match self.send_direct(header, key, record_bytes)? {
            direct::Sent::NotDirect => {}
            direct::Sent::Refused => return Ok(()),
            direct::Sent::Whole => {
                self.count_served(record_bytes, start);
                return Ok(());
            }
        }
        // Nothing is promised before the first piece has been read.
        let first = first_bytes(record_bytes);
        let read =
            self.shared.store.read_at(key, 0, &mut self.buffer[HEADER_BYTES..HEADER_BYTES + first]);
        if let Err(error) = read {
            tracing::error!(%key, %error, "a record could not be read");
            return self.answer_error(header, Status::Unreadable, &error.to_string());
        }
        let answer = FrameHeader {
            frame: FrameType::Record,
            status: Status::Ok,
            request_id: header.request_id,
            body_bytes: record_bytes,
        };
        self.buffer[..HEADER_BYTES].copy_from_slice(&answer.encode());
        self.send(HEADER_BYTES + first)?;
        self.send_rest(key, record_bytes, first as u64)?;
        self.count_served(record_bytes, start);
        Ok(())
    }

    pub(super) fn count_served(&self, record_bytes: u64, start: Instant) {
        self.shared.tally.served.fetch_add(1, Ordering::Relaxed);
        self.shared.tally.bytes.fetch_add(record_bytes, Ordering::Relaxed);
        self.counters.served.increment(1);
        self.counters.bytes.increment(record_bytes);
        self.counters.seconds.record(start.elapsed());
    }

    /// Sends the record from byte `done` on, straight from the page cache: over loopback that moves
    /// the bytes once instead of three times. A file system without `sendfile` gets its records
    /// sent through the buffer. A failed read ends the connection here: the length has been
    /// promised, and a client must never take filler for weights.
    fn send_rest(&mut self, key: ExpertKey, record_bytes: u64, mut done: u64) -> Result<(), End> {
        while done < record_bytes && !self.shared.sendfile.is_refused() {
            let left = usize::try_from(record_bytes - done).unwrap_or(SEND_BYTES);
            match self.shared.store.send_at(key, done, left.min(SEND_BYTES), &self.socket) {
                Ok(count) => done += count as u64,
                Err(error) => match whose(&error) {
                    Whose::Sendfile => self.shared.sendfile.refuse(&error),
                    Whose::Client => return Err(End::Closed),
                    Whose::NoRoom => wait_for_room(&self.socket, self.shared.options.stall)?,
                    Whose::Network(error) => return Err(End::Socket(error)),
                    Whose::Store => return Err(error.into()),
                },
            }
        }
        while done < record_bytes {
            let left = usize::try_from(record_bytes - done).unwrap_or(BUFFER_BYTES);
            let piece = left.min(BUFFER_BYTES);
            self.shared.store.read_at(key, done, &mut self.buffer[..piece])?;
            self.send(piece)?;
            done += piece as u64;
        }
        Ok(())
    }

    pub(super) fn answer_error(
        &mut self,
        header: &FrameHeader,
        status: Status,
        text: &str,
    ) -> Result<(), End> {
        self.count_error(status);
        let text = clip(text).as_bytes();
        let answer = FrameHeader {
            frame: FrameType::Record,
            status,
            request_id: header.request_id,
            body_bytes: text.len() as u64,
        };
        let frame = [&answer.encode()[..], text].concat();
        send_all(&self.socket, &frame, self.shared.options.stall)
    }

    pub(super) fn count_error(&self, status: Status) {
        self.shared.tally.errors.fetch_add(1, Ordering::Relaxed);
        counter!("metrale_peer_requests_total", "status" => status.name()).increment(1);
    }
}

/// Bytes of a record that are read before anything is sent.
fn first_bytes(record_bytes: u64) -> usize {
    match usize::try_from(record_bytes) {
        Ok(bytes) if bytes <= BUFFER_BYTES => bytes,
        _ => FIRST_BYTES,
    }
}
