//! Answering requests past the page cache, on a peer that is told to.

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::layer_file_name;
use expert_tier::wire::frame::{FrameHeader, FrameType, HEADER_BYTES, Status};

use super::send::send_all;
use super::{Connection, End};
use crate::direct_send::{DirectSender, SendError, Stretch};
use crate::push::SpillWish;
use crate::server::Shared;

/// What a connection has for direct reads.
pub(super) enum Direct {
    /// Nothing yet.
    Untried,
    Ready(Box<DirectSender>),
    /// There was nothing left for it: it reads as others do, to its end.
    Refused,
}

impl Direct {
    /// What direct reads take, if it is to be had; tried once.
    fn sender(&mut self, shared: &Shared) -> Option<&mut DirectSender> {
        if let Self::Untried = self {
            *self = match DirectSender::new(&shared.store, shared.disk.clone()) {
                Ok(sender) => Self::Ready(Box::new(sender)),
                Err(error) => {
                    shared.shortages.one_more(&error);
                    Self::Refused
                }
            };
        }
        match self {
            Self::Ready(sender) => Some(sender),
            Self::Untried | Self::Refused => None,
        }
    }
}

/// How a record was sent.
pub(super) enum Sent {
    /// All of it.
    Whole,
    /// Not at all, and the client has been told.
    Refused,
    /// Not at all: it is to be sent as others are.
    NotDirect,
}

impl Connection {
    /// Sends a record that lies in no memory of the peer's, with its header, past the page cache, if
    /// the peer is told to and can.
    pub(super) fn send_direct(
        &mut self,
        header: &FrameHeader,
        key: ExpertKey,
        record_bytes: u64,
    ) -> Result<Sent, End> {
        let wish = self.shared.options.push.source;
        let located = self.shared.store.manifest().layout().locate_at(key);
        let (SpillWish::Direct, Ok((layer_at, layer))) = (wish, located) else {
            return Ok(Sent::NotDirect);
        };
        let residency = self.shared.published.as_ref().map(|published| published.residency());
        if residency.is_some_and(|it| it.holds(layer_at, key.expert)) {
            return Ok(Sent::NotDirect);
        }
        let offset = u64::from(key.expert) * layer.stride();
        let stretch = Stretch { layer_at, offset, bytes: record_bytes };
        let (stall, deadline) = (self.shared.options.stall, self.shared.options.push.deadline);
        let Some(sender) = self.direct.sender(&self.shared) else { return Ok(Sent::NotDirect) };
        let answer = FrameHeader {
            frame: FrameType::Record,
            status: Status::Ok,
            request_id: header.request_id,
            body_bytes: record_bytes,
        };
        let answer: [u8; HEADER_BYTES] = answer.encode();
        // Nothing is promised before the first piece has been read.
        let mut promised = false;
        let sent = sender.send(stretch, deadline, |piece| {
            if !promised {
                promised = true;
                send_all(&self.socket, &answer, stall)?;
            }
            send_all(&self.socket, piece, stall)
        });
        let why = match sent {
            Ok(()) => return Ok(Sent::Whole),
            Err(SendError::Sink(end)) => return Err(end),
            Err(SendError::Read(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                let name = layer_file_name(layer.layer());
                format!("{name} ended inside {key}: it was truncated")
            }
            Err(SendError::Read(error)) => error.to_string(),
            Err(SendError::Stalled) => {
                let ms = deadline.as_millis();
                format!("the disk gave nothing for {ms} ms; --push-deadline-ms bounds this")
            }
        };
        tracing::error!(%key, why, "a record could not be read");
        if promised {
            return Err(End::Disk(why));
        }
        self.answer_error(header, Status::Unreadable, &why)?;
        Ok(Sent::Refused)
    }
}
