//! Both sides of the handshake as state machines: frames in, bytes to send out.
//!
//! ```text
//! client                      peer
//!   ClientHello        ->
//!                      <-  ServerHello
//!   ClientProof        ->                    with a secret only
//!                      <-  ServerProof       with a secret only
//!                      <-  Welcome           which store
//!   ManifestRequest    ->                    when the client has no manifest yet
//!                      <-  Manifest
//!   Attach             ->                    "I want this very store"
//!                      <-  Attached
//! ```
//!
//! The peer may answer anything with `Refusal` and close. No weights flow before `Attached`, and
//! `Attached` follows only where both ends name the same fingerprint. The machines do no I/O and
//! read no clock: how long a step may take is the driver's to bound.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::fingerprint::Fingerprint;
use crate::store::manifest::{Manifest, ManifestError};
use crate::wire::VERSION;
use crate::wire::auth::{Role, Secret};
use crate::wire::frame::{FrameError, FrameHeader, FrameType, MAX_TEXT_BYTES, Status};
use crate::wire::message::{Auth, ClientHello, ServerHello, Welcome};

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Bytes that are no frame, or a frame out of turn.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A hello of another protocol.
    #[error("the {frame:?} is not one of the expert protocol")]
    NotThisProtocol {
        /// The frame whose body is wrong.
        frame: FrameType,
    },
    /// The other end chose or offers versions that this program does not speak.
    #[error("the other end speaks protocol version {found}, this program speaks {VERSION}")]
    Version {
        /// Version or versions of the other end.
        found: String,
    },
    /// The peer wants a proof and the client has no secret.
    #[error("the peer wants a secret: give it with --secret-file or METRALE_EXPERT_SECRET_FILE")]
    SecretWanted,
    /// The client has a secret and the peer does not prove that it knows it.
    #[error(
        "this client has a secret, but the peer asks for none and so proves nothing: start the \
         peer with the same --secret-file, or the client without"
    )]
    SecretNotUsed,
    /// The other end does not know the secret.
    #[error("wrong secret: the two ends' --secret-file differ")]
    WrongSecret,
    /// The peer serves another store than the client wants.
    #[error("the peer serves store {found}, wanted is {expected}: another model or other weights")]
    OtherStore {
        /// Fingerprint that the peer serves.
        found: Fingerprint,
        /// Fingerprint that the client wants.
        expected: Fingerprint,
    },
    /// The manifest that the peer sent is not usable, or not the one it announced.
    #[error("the peer's manifest: {0}")]
    Manifest(#[from] ManifestError),
    /// The manifest is not the announced one.
    #[error("the peer announced a manifest of {announced} bytes and sent {found}")]
    ManifestLength {
        /// Bytes announced.
        announced: u64,
        /// Bytes sent.
        found: u64,
    },
    /// The peer said no.
    #[error("the peer refused ({}): {text}", status.name())]
    Refused {
        /// Why, for programs.
        status: Status,
        /// Why, for people.
        text: String,
    },
}

/// What a client wants of a connection.
#[derive(Clone, Debug)]
pub enum Goal {
    /// To ask for the peer's status; the handshake ends with `Welcome`.
    Status,
    /// To fetch from whatever store the peer serves, or from one named in advance.
    Discover(Option<Fingerprint>),
    /// To fetch from the store of this manifest.
    Resume(Arc<Manifest>),
}

/// What the driver does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Send these bytes, then read a frame.
    Send(Vec<u8>),
    /// Read a frame.
    Read,
    /// The handshake is over.
    Done,
}

/// The hash of every handshake byte so far; proofs are made over it.
#[derive(Default)]
struct Transcript(Sha256);

impl Transcript {
    fn add(&mut self, header: &FrameHeader, body: &[u8]) {
        self.0.update(header.encode());
        self.0.update(body);
    }

    fn hash(&self) -> [u8; 32] {
        self.0.clone().finalize().into()
    }

    /// Adds a frame of ours and gives its bytes.
    fn frame(&mut self, frame: FrameType, body: &[u8]) -> Vec<u8> {
        let bytes = encode_frame(frame, Status::Ok, body);
        self.0.update(&bytes);
        bytes
    }
}

/// The bytes of a control frame.
#[must_use]
pub fn encode_frame(frame: FrameType, status: Status, body: &[u8]) -> Vec<u8> {
    let header = FrameHeader { status, ..FrameHeader::control(frame, body.len() as u64) };
    [&header.encode()[..], body].concat()
}

/// The bytes of a refusal; the text is cut to what a frame allows.
#[must_use]
pub fn encode_refusal(status: Status, text: &str) -> Vec<u8> {
    encode_frame(FrameType::Refusal, status, clip(text).as_bytes())
}

/// The longest prefix of `text` that a frame allows.
#[must_use]
pub fn clip(text: &str) -> &str {
    let most = usize::try_from(MAX_TEXT_BYTES).unwrap_or(usize::MAX);
    &text[..text.floor_char_boundary(most)]
}

/// The client's side.
pub struct ClientHandshake {
    goal: Goal,
    secret: Option<Secret>,
    transcript: Transcript,
    state: ClientState,
}

enum ClientState {
    ServerHello,
    ServerProof([u8; 32]),
    Welcome,
    Manifest(Welcome),
    Attached(Arc<Manifest>),
    Done(Option<Arc<Manifest>>),
}

impl ClientHandshake {
    /// Begins a handshake; the bytes are to be sent first.
    #[must_use]
    pub fn start(
        goal: Goal,
        secret: Option<Secret>,
        client_id: [u8; 16],
        nonce: [u8; 32],
    ) -> (Self, Vec<u8>) {
        let hello = ClientHello {
            min_version: VERSION,
            max_version: VERSION,
            capabilities: 0,
            client_id,
            nonce,
        };
        let mut transcript = Transcript::default();
        let bytes = transcript.frame(FrameType::ClientHello, &hello.encode());
        (Self { goal, secret, transcript, state: ClientState::ServerHello }, bytes)
    }

    /// The manifest of the store attached to; `None` before the end and for [`Goal::Status`].
    #[must_use]
    pub fn manifest(&self) -> Option<&Arc<Manifest>> {
        match &self.state {
            ClientState::Done(manifest) => manifest.as_ref(),
            _ => None,
        }
    }

    /// Takes the peer's next frame.
    ///
    /// # Errors
    /// The peer refused, broke the protocol, or is not the one wanted. The connection is of no
    /// further use.
    pub fn on_frame(&mut self, header: &FrameHeader, body: &[u8]) -> Result<Step, HandshakeError> {
        if header.frame == FrameType::Refusal {
            let text = String::from_utf8_lossy(body);
            let text = text.chars().filter(|c| !c.is_control()).collect();
            return Err(HandshakeError::Refused { status: header.status, text });
        }
        if header.frame == FrameType::Drain {
            let (status, text) = (Status::Draining, "it is shutting down".into());
            return Err(HandshakeError::Refused { status, text });
        }
        match &self.state {
            ClientState::ServerHello => {
                expect(header, FrameType::ServerHello, "ServerHello")?;
                self.on_hello(header, body)
            }
            ClientState::ServerProof(transcript) => {
                expect(header, FrameType::ServerProof, "ServerProof")?;
                let known = self.secret.as_ref();
                if !known.is_some_and(|s| s.accepts(Role::Server, transcript, body)) {
                    return Err(HandshakeError::WrongSecret);
                }
                self.state = ClientState::Welcome;
                Ok(Step::Read)
            }
            ClientState::Welcome => {
                expect(header, FrameType::Welcome, "Welcome")?;
                let not_ours = HandshakeError::NotThisProtocol { frame: header.frame };
                self.on_welcome(Welcome::decode(body).ok_or(not_ours)?)
            }
            ClientState::Manifest(welcome) => {
                expect(header, FrameType::Manifest, "Manifest")?;
                let manifest = check_manifest(*welcome, body)?;
                Ok(self.attach(Arc::new(manifest)))
            }
            ClientState::Attached(manifest) => {
                expect(header, FrameType::Attached, "Attached")?;
                self.state = ClientState::Done(Some(Arc::clone(manifest)));
                Ok(Step::Done)
            }
            ClientState::Done(_) => Err(unexpected(header, "nothing")),
        }
    }

    fn on_hello(&mut self, header: &FrameHeader, body: &[u8]) -> Result<Step, HandshakeError> {
        let hello = ServerHello::decode(body)
            .ok_or(HandshakeError::NotThisProtocol { frame: header.frame })?;
        if hello.version != VERSION {
            return Err(HandshakeError::Version { found: hello.version.to_string() });
        }
        self.transcript.add(header, body);
        match (hello.auth, &self.secret) {
            (Auth::None, None) => {
                self.state = ClientState::Welcome;
                Ok(Step::Read)
            }
            (Auth::None, Some(_)) => Err(HandshakeError::SecretNotUsed),
            (Auth::SharedSecret, None) => Err(HandshakeError::SecretWanted),
            (Auth::SharedSecret, Some(secret)) => {
                let proof = secret.proof(Role::Client, &self.transcript.hash());
                let bytes = self.transcript.frame(FrameType::ClientProof, &proof);
                self.state = ClientState::ServerProof(self.transcript.hash());
                Ok(Step::Send(bytes))
            }
        }
    }

    fn on_welcome(&mut self, welcome: Welcome) -> Result<Step, HandshakeError> {
        let wanted = match &self.goal {
            Goal::Status => {
                self.state = ClientState::Done(None);
                return Ok(Step::Done);
            }
            Goal::Discover(wanted) => *wanted,
            Goal::Resume(manifest) => Some(manifest.fingerprint()),
        };
        if let Some(expected) = wanted.filter(|wanted| *wanted != welcome.fingerprint) {
            return Err(HandshakeError::OtherStore { found: welcome.fingerprint, expected });
        }
        if let Goal::Resume(manifest) = &self.goal {
            return Ok(self.attach(Arc::clone(manifest)));
        }
        self.state = ClientState::Manifest(welcome);
        Ok(Step::Send(encode_frame(FrameType::ManifestRequest, Status::Ok, &[])))
    }

    fn attach(&mut self, manifest: Arc<Manifest>) -> Step {
        let body = manifest.fingerprint().0;
        self.state = ClientState::Attached(manifest);
        Step::Send(encode_frame(FrameType::Attach, Status::Ok, &body))
    }
}

/// Parses what the peer sent and holds it against what it announced.
fn check_manifest(welcome: Welcome, body: &[u8]) -> Result<Manifest, HandshakeError> {
    let (announced, found) = (welcome.manifest_bytes, body.len() as u64);
    if announced != found {
        return Err(HandshakeError::ManifestLength { announced, found });
    }
    let manifest = Manifest::parse(body)?;
    let (found, expected) = (manifest.fingerprint(), welcome.fingerprint);
    if found != expected {
        return Err(HandshakeError::OtherStore { found, expected });
    }
    Ok(manifest)
}

/// The peer's side, up to and including `Welcome`.
pub struct ServerHandshake {
    secret: Option<Secret>,
    nonce: [u8; 32],
    welcome: Welcome,
    transcript: Transcript,
    state: ServerState,
}

enum ServerState {
    ClientHello,
    ClientProof,
    Done,
}

/// What the peer's driver does next.
#[derive(Debug, PartialEq, Eq)]
pub struct ServerStep {
    /// Send these bytes.
    pub send: Vec<u8>,
    /// The client has been welcomed.
    pub done: bool,
    /// The client's id, once its hello was read.
    pub client_id: Option<[u8; 16]>,
}

impl ServerHandshake {
    /// Awaits a client's hello; `nonce` is 32 fresh random bytes.
    #[must_use]
    pub fn new(secret: Option<Secret>, nonce: [u8; 32], welcome: Welcome) -> Self {
        let transcript = Transcript::default();
        Self { secret, nonce, welcome, transcript, state: ServerState::ClientHello }
    }

    /// Takes the client's next frame.
    ///
    /// # Errors
    /// The client broke the protocol or does not know the secret. [`refusal`] has what to tell it.
    pub fn on_frame(
        &mut self,
        header: &FrameHeader,
        body: &[u8],
    ) -> Result<ServerStep, HandshakeError> {
        match self.state {
            ServerState::ClientHello => {
                expect(header, FrameType::ClientHello, "ClientHello")?;
                self.on_hello(header, body)
            }
            ServerState::ClientProof => {
                expect(header, FrameType::ClientProof, "ClientProof")?;
                let transcript = self.transcript.hash();
                let known = self.secret.as_ref();
                let Some(secret) = known.filter(|s| s.accepts(Role::Client, &transcript, body))
                else {
                    return Err(HandshakeError::WrongSecret);
                };
                self.transcript.add(header, body);
                let proof = secret.proof(Role::Server, &self.transcript.hash());
                let mut send = encode_frame(FrameType::ServerProof, Status::Ok, &proof);
                send.extend(self.welcome());
                self.state = ServerState::Done;
                Ok(ServerStep { send, done: true, client_id: None })
            }
            ServerState::Done => Err(unexpected(header, "nothing")),
        }
    }

    fn on_hello(
        &mut self,
        header: &FrameHeader,
        body: &[u8],
    ) -> Result<ServerStep, HandshakeError> {
        let hello = ClientHello::decode(body)
            .ok_or(HandshakeError::NotThisProtocol { frame: header.frame })?;
        if !(hello.min_version..=hello.max_version).contains(&VERSION) {
            let found = format!("{} to {}", hello.min_version, hello.max_version);
            return Err(HandshakeError::Version { found });
        }
        self.transcript.add(header, body);
        let auth = if self.secret.is_some() { Auth::SharedSecret } else { Auth::None };
        let answer = ServerHello { version: VERSION, auth, capabilities: 0, nonce: self.nonce };
        let mut send = self.transcript.frame(FrameType::ServerHello, &answer.encode());
        let done = auth == Auth::None;
        if done {
            send.extend(self.welcome());
        }
        self.state = if done { ServerState::Done } else { ServerState::ClientProof };
        Ok(ServerStep { send, done, client_id: Some(hello.client_id) })
    }

    fn welcome(&self) -> Vec<u8> {
        encode_frame(FrameType::Welcome, Status::Ok, &self.welcome.encode())
    }
}

/// What a peer tells a client whose handshake failed with `error`.
#[must_use]
pub fn refusal(error: &HandshakeError) -> (Status, String) {
    let status = match error {
        HandshakeError::Version { .. } => Status::Version,
        HandshakeError::WrongSecret => Status::Secret,
        HandshakeError::OtherStore { .. } => Status::OtherStore,
        _ => Status::Protocol,
    };
    (status, error.to_string())
}

fn expect(
    header: &FrameHeader,
    wanted: FrameType,
    expected: &'static str,
) -> Result<(), HandshakeError> {
    if header.frame == wanted { Ok(()) } else { Err(unexpected(header, expected)) }
}

fn unexpected(header: &FrameHeader, expected: &'static str) -> HandshakeError {
    FrameError::Unexpected { found: header.frame, expected }.into()
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
