//! The part of a connection that is about rails: their handshake, the tables after it, and their end.

use std::sync::atomic::Ordering;

use expert_tier::wire::frame::{FrameError, FrameHeader};

use super::{Connection, End};
use crate::push::ClientId;
use crate::rails::RailClient;

impl Connection {
    /// Ends the client's access to memory; with the connection, before anything else.
    pub(super) fn end_rails(&mut self) {
        if let Some(client) = self.rail_client.take() {
            let pairs = client.queue_pairs() as u64;
            drop(client);
            self.shared.tally.queue_pairs.fetch_sub(pairs, Ordering::Relaxed);
        }
    }

    /// A message of the rails' handshake.
    pub(super) fn rails(&mut self, header: &FrameHeader) -> Result<(), End> {
        let kind = header.frame.rails_kind().filter(|kind| kind.is_from_client());
        let Some(kind) = kind else {
            let (found, expected) = (header.frame, "a message that clients send");
            return Err(FrameError::Unexpected { found, expected }.into());
        };
        // Its type bounds it: what a client sends is a few kilobytes.
        let mut body = vec![0; usize::try_from(header.body_bytes).unwrap_or(usize::MAX)];
        self.read_rest(&mut body)?;
        let Some(published) = &self.shared.published else { return Err(End::NoRails) };
        let client = match &mut self.rail_client {
            Some(client) => client,
            none => {
                let id = ClientId(self.client_id);
                let offered = published.offer().ok_or(End::NoRailNow)?;
                none.insert(RailClient::new(published, offered, id, &self.socket)?)
            }
        };
        let pairs_before = client.queue_pairs();
        let answers = client.on_message(kind, &body);
        let queue_pairs = client.queue_pairs();
        // Before an error is: it may have come after some of the queue pairs were there.
        let made = queue_pairs.saturating_sub(pairs_before) as u64;
        self.shared.tally.queue_pairs.fetch_add(made, Ordering::Relaxed);
        let answers = answers?;
        if made > 0 {
            tracing::info!(client = %self.client, queue_pairs, "connected over RDMA");
        }
        for (kind, body) in answers {
            self.send_control(kind.into(), &body)?;
        }
        Ok(())
    }

    /// Sends the table of what is in memory, if it has changed since.
    pub(super) fn follow_table(&mut self) -> Result<(), End> {
        let Some(client) = &mut self.rail_client else { return Ok(()) };
        match client.newer_table()? {
            Some((kind, body)) => self.send_control(kind.into(), &body),
            None => Ok(()),
        }
    }
}
