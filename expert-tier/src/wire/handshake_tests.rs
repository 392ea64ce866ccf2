//! Drives both machines against each other without a socket.

use super::*;
use crate::testing::tiny_manifest;
use crate::wire::frame::HEADER_BYTES;

/// One whole handshake in memory; at most `MAX_FRAMES` frames may pass.
struct Pair {
    client: ClientHandshake,
    server: ServerHandshake,
    manifest: Arc<Manifest>,
    to_server: Vec<u8>,
    /// Frames that have come to either machine.
    came: usize,
    /// The frame, counted from 0, that comes as one of another type, with its own body.
    mislabelled: Option<usize>,
}

const MAX_FRAMES: usize = 20;

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).unwrap()
}

fn pair(goal: Goal, ours: Option<&str>, theirs: Option<&str>) -> Pair {
    let manifest = Arc::new(tiny_manifest(1));
    let (client, to_server) = ClientHandshake::start(goal, ours.map(secret), [1; 16], [2; 32]);
    let welcome = Welcome {
        fingerprint: manifest.fingerprint(),
        manifest_bytes: manifest.as_bytes().len() as u64,
    };
    let server = ServerHandshake::new(theirs.map(secret), [3; 32], welcome);
    Pair { client, server, manifest, to_server, came: 0, mislabelled: None }
}

fn split(bytes: &mut Vec<u8>) -> Option<(FrameHeader, Vec<u8>)> {
    let header = FrameHeader::decode(bytes.first_chunk::<HEADER_BYTES>()?).unwrap();
    let end = HEADER_BYTES + usize::try_from(header.body_bytes).unwrap();
    let body = bytes.get(HEADER_BYTES..end)?.to_vec();
    bytes.drain(..end);
    Some((header, body))
}

impl Pair {
    /// Runs to the end; `tamper` may change each frame on its way to the client.
    fn run(&mut self, tamper: impl Fn(&mut Vec<u8>)) -> Result<(), HandshakeError> {
        let mut to_client = Vec::new();
        let mut welcomed = false;
        for _ in 0..MAX_FRAMES {
            while let Some((header, body)) = split(&mut self.to_server) {
                if welcomed {
                    to_client.extend(self.after_welcome(&header));
                } else {
                    let header = self.labelled(header);
                    let step = self.server.on_frame(&header, &body)?;
                    to_client.extend(step.send);
                    welcomed = step.done;
                }
            }
            tamper(&mut to_client);
            let Some((header, body)) = split(&mut to_client) else { break };
            let header = self.labelled(header);
            match self.client.on_frame(&header, &body)? {
                Step::Send(bytes) => self.to_server.extend(bytes),
                Step::Read => {}
                Step::Done => return Ok(()),
            }
        }
        panic!("the handshake stalled");
    }

    fn labelled(&mut self, header: FrameHeader) -> FrameHeader {
        let nth = self.came;
        self.came += 1;
        let frame = if self.mislabelled == Some(nth) { FrameType::Record } else { header.frame };
        FrameHeader { frame, ..header }
    }

    fn after_welcome(&self, header: &FrameHeader) -> Vec<u8> {
        match header.frame {
            FrameType::ManifestRequest => {
                encode_frame(FrameType::Manifest, Status::Ok, self.manifest.as_bytes())
            }
            FrameType::Attach => encode_frame(FrameType::Attached, Status::Ok, &[]),
            other => panic!("the client sent {other:?}"),
        }
    }
}

#[test]
fn a_client_learns_the_manifest_with_and_without_a_secret() {
    for secret in [None, Some("the same secret!")] {
        let mut pair = pair(Goal::Discover(None), secret, secret);
        pair.run(|_| {}).unwrap();
        assert_eq!(pair.client.manifest(), Some(&pair.manifest));
    }
}

#[test]
fn a_client_that_has_the_manifest_does_not_ask_for_it() {
    let manifest = Arc::new(tiny_manifest(1));
    let mut pair = pair(Goal::Resume(Arc::clone(&manifest)), None, None);
    pair.run(|bytes| {
        let manifest = (FrameType::Manifest as u16).to_le_bytes();
        assert!(!bytes.starts_with(&manifest));
    })
    .unwrap();
    assert_eq!(pair.client.manifest(), Some(&manifest));
}

#[test]
fn another_store_is_refused_before_attach() {
    let other = Arc::new(tiny_manifest(2));
    for goal in [Goal::Resume(Arc::clone(&other)), Goal::Discover(Some(other.fingerprint()))] {
        let error = pair(goal, None, None).run(|_| {}).unwrap_err();
        assert!(matches!(error, HandshakeError::OtherStore { .. }), "{error}");
    }
}

#[test]
fn secrets_that_differ_or_stand_on_one_side_are_told_apart() {
    let run = |ours, theirs| pair(Goal::Discover(None), ours, theirs).run(|_| {}).unwrap_err();
    let error = run(Some("the right secret"), Some("the wrong secret"));
    assert!(matches!(error, HandshakeError::WrongSecret));
    assert!(matches!(run(None, Some("the right secret")), HandshakeError::SecretWanted));
    assert!(matches!(run(Some("the right secret"), None), HandshakeError::SecretNotUsed));
}

#[test]
fn a_peer_that_does_not_know_the_secret_cannot_pass_for_one_that_does() {
    // The client's own proof, sent back to it, and a proof of zeros.
    let mut pair = pair(Goal::Discover(None), Some("the same secret!"), Some("the same secret!"));
    let error = pair
        .run(|bytes| {
            if bytes.starts_with(&(FrameType::ServerProof as u16).to_le_bytes()) {
                bytes[HEADER_BYTES..HEADER_BYTES + 32].fill(0);
            }
        })
        .unwrap_err();
    assert!(matches!(error, HandshakeError::WrongSecret));
}

/// What the peer answers to a client that sends `hello` and then `proof`, whatever that is worth: the
/// client here checks nothing, so the peer alone can refuse.
fn answer_to_proof(proof: impl Fn(&[u8]) -> Vec<u8>) -> Result<ServerStep, HandshakeError> {
    let Pair { mut server, mut to_server, .. } =
        pair(Goal::Discover(None), None, Some("the same secret!"));
    let hello = to_server.clone();
    let (header, body) = split(&mut to_server).unwrap();
    let answer = server.on_frame(&header, &body).unwrap();
    assert!(!answer.done, "a peer with a secret welcomes nobody who has not proved to know it");
    let mut sent = answer.send.clone();
    let (header, body) = split(&mut sent).unwrap();
    assert_eq!((header.frame, sent.len()), (FrameType::ServerHello, 0), "and nothing behind it");
    assert_eq!(ServerHello::decode(&body).unwrap().auth, Auth::SharedSecret);
    let proof = proof(&[hello, answer.send].concat());
    let header = FrameHeader::control(FrameType::ClientProof, proof.len() as u64);
    server.on_frame(&header, &proof)
}

/// Makes a proof of the bytes that both ends have sent.
type Prover<'a> = Box<dyn Fn(&[u8]) -> Vec<u8> + 'a>;

#[test]
fn a_client_that_does_not_know_the_secret_is_refused_and_not_welcomed() {
    let digest = |bytes: &[u8]| -> [u8; 32] { Sha256::digest(bytes).into() };
    let theirs = secret("the same secret!");
    let ours = secret("another secret!!");
    let attempts: [(&str, Prover<'_>); 6] = [
        ("zeros", Box::new(|_| vec![0; 32])),
        ("nothing", Box::new(|_| vec![])),
        ("a part of it", Box::new(|sent| theirs.proof(Role::Client, &digest(sent))[..31].into())),
        ("another secret's", Box::new(|sent| ours.proof(Role::Client, &digest(sent)).into())),
        ("the peer's own", Box::new(|sent| theirs.proof(Role::Server, &digest(sent)).into())),
        ("another connection's", Box::new(|_| theirs.proof(Role::Client, &[7; 32]).into())),
    ];
    for (what, proof) in attempts {
        let error = answer_to_proof(proof).expect_err(what);
        assert!(matches!(error, HandshakeError::WrongSecret), "{what}: {error}");
        assert_eq!(refusal(&error).0, Status::Secret, "{what}");
    }
    // The same by a client that knows it, so it was the proofs that were wrong.
    let right = answer_to_proof(|sent| theirs.proof(Role::Client, &digest(sent)).into()).unwrap();
    assert!(right.done);
    let mut sent = right.send;
    let frames = [split(&mut sent).unwrap().0.frame, split(&mut sent).unwrap().0.frame];
    assert_eq!(frames, [FrameType::ServerProof, FrameType::Welcome]);
}

#[test]
fn an_altered_hello_spoils_the_proof() {
    let mut pair = pair(Goal::Discover(None), Some("the same secret!"), Some("the same secret!"));
    let error = pair
        .run(|bytes| {
            if bytes.starts_with(&(FrameType::ServerHello as u16).to_le_bytes()) {
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
            }
        })
        .unwrap_err();
    assert!(matches!(error, HandshakeError::WrongSecret));
}

#[test]
fn a_refusal_reaches_the_caller_with_its_text() {
    let (mut client, _) = ClientHandshake::start(Goal::Status, None, [0; 16], [0; 32]);
    let mut bytes = encode_refusal(Status::Busy, "all 64 clients are here\n");
    let (header, body) = split(&mut bytes).unwrap();
    let error = client.on_frame(&header, &body).unwrap_err().to_string();
    assert_eq!(error, "the peer refused (busy): all 64 clients are here");
}

#[test]
fn a_peer_that_drains_during_the_handshake_is_said_to() {
    let (mut client, _) = ClientHandshake::start(Goal::Status, None, [0; 16], [0; 32]);
    let drain = FrameHeader::control(FrameType::Drain, 0);
    let error = client.on_frame(&drain, &[]).unwrap_err().to_string();
    assert_eq!(error, "the peer refused (draining): it is shutting down");
}

#[test]
fn a_frame_out_of_turn_is_an_error_in_every_state() {
    for frame in [FrameType::Record, FrameType::Attached, FrameType::Drain, FrameType::Welcome] {
        let header = FrameHeader::control(frame, 0);
        let (mut client, _) = ClientHandshake::start(Goal::Status, None, [0; 16], [0; 32]);
        assert!(client.on_frame(&header, &[]).is_err());
        let mut server = pair(Goal::Status, None, None).server;
        assert!(server.on_frame(&header, &[]).is_err());
    }
}

#[test]
fn the_right_body_in_a_frame_of_another_type_is_refused_in_every_state() {
    let shared = Some("the same secret!");
    let mut sound = pair(Goal::Discover(None), shared, shared);
    sound.run(|_| {}).unwrap();
    // ClientHello, ServerHello, both proofs, Welcome, Manifest, Attached.
    assert_eq!(sound.came, 7);
    for nth in 0..sound.came {
        let mut pair = pair(Goal::Discover(None), shared, shared);
        pair.mislabelled = Some(nth);
        let error = pair.run(|_| {}).unwrap_err();
        let HandshakeError::Frame(FrameError::Unexpected { found, .. }) = error else {
            panic!("frame {nth}: {error}");
        };
        assert_eq!(found, FrameType::Record, "frame {nth}");
        assert_eq!(pair.client.manifest(), None, "frame {nth}");
    }
}

#[test]
fn a_peer_that_serves_another_store_says_so_with_a_status_of_its_own() {
    let (found, expected) = (tiny_manifest(1).fingerprint(), tiny_manifest(2).fingerprint());
    let (status, text) = refusal(&HandshakeError::OtherStore { found, expected });
    assert_eq!(status, Status::OtherStore);
    assert!(text.contains(&expected.to_string()), "{text}");
}

#[test]
fn versions_that_do_not_meet_are_named() {
    let hello = ClientHello {
        min_version: 2,
        max_version: 5,
        capabilities: 0,
        client_id: [0; 16],
        nonce: [0; 32],
    };
    let header = FrameHeader::control(FrameType::ClientHello, 64);
    let mut server = pair(Goal::Status, None, None).server;
    let error = server.on_frame(&header, &hello.encode()).unwrap_err();
    let (status, text) = refusal(&error);
    assert_eq!(status, Status::Version);
    assert!(text.contains("version 2 to 5"), "{text}");
}
