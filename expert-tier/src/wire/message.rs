//! The bodies of fixed size; docs/protocol.md has them as byte tables.

use crate::fingerprint::Fingerprint;
use crate::key::ExpertKey;

/// First bytes of both hellos.
pub const MAGIC: [u8; 8] = *b"MTRLPEER";

/// `ClientHello`: magic, lowest and highest version, capabilities, client id, nonce.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientHello {
    /// Lowest protocol version the client speaks.
    pub min_version: u16,
    /// Highest protocol version the client speaks.
    pub max_version: u16,
    /// Bits for what the client can do beyond version 1's rules; none is defined yet.
    pub capabilities: u32,
    /// The same for every connection of one client, random otherwise.
    pub client_id: [u8; 16],
    /// Fresh random bytes.
    pub nonce: [u8; 32],
}

impl ClientHello {
    /// Bytes of the body.
    pub const BYTES: usize = 64;

    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.min_version.to_le_bytes());
        out[10..12].copy_from_slice(&self.max_version.to_le_bytes());
        out[12..16].copy_from_slice(&self.capabilities.to_le_bytes());
        out[16..32].copy_from_slice(&self.client_id);
        out[32..64].copy_from_slice(&self.nonce);
        out
    }

    /// Reads a body; `None` where length or magic is another's.
    #[must_use]
    pub fn decode(body: &[u8]) -> Option<Self> {
        let body: &[u8; Self::BYTES] = body.try_into().ok()?;
        Some(Self {
            min_version: u16::from_le_bytes(field(body, 8)),
            max_version: u16::from_le_bytes(field(body, 10)),
            capabilities: u32::from_le_bytes(field(body, 12)),
            client_id: field(body, 16),
            nonce: field(body, 32),
        })
        .filter(|_| body.starts_with(&MAGIC))
    }
}

/// `ServerHello`: magic, version chosen, whether a proof is wanted, capabilities, nonce.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerHello {
    /// The version that the rest of the connection speaks.
    pub version: u16,
    /// Whether both ends must prove that they know the secret.
    pub auth: Auth,
    /// The client's capability bits that the peer has too.
    pub capabilities: u32,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
}

/// How the ends of a connection prove who they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Auth {
    /// Not at all.
    None = 0,
    /// Both by HMAC-SHA256 with a shared secret.
    SharedSecret = 1,
}

impl ServerHello {
    /// Bytes of the body.
    pub const BYTES: usize = 56;

    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.auth as u8;
        out[12..16].copy_from_slice(&self.capabilities.to_le_bytes());
        out[24..56].copy_from_slice(&self.nonce);
        out
    }

    /// Reads a body; `None` where length, magic, kind of proof or a reserved byte is another's.
    #[must_use]
    pub fn decode(body: &[u8]) -> Option<Self> {
        let body: &[u8; Self::BYTES] = body.try_into().ok()?;
        if body[11] != 0 || field::<8>(body, 16) != [0; 8] {
            return None;
        }
        let auth = match body[10] {
            0 => Auth::None,
            1 => Auth::SharedSecret,
            _ => return None,
        };
        Some(Self {
            version: u16::from_le_bytes(field(body, 8)),
            auth,
            capabilities: u32::from_le_bytes(field(body, 12)),
            nonce: field(body, 24),
        })
        .filter(|_| body.starts_with(&MAGIC))
    }
}

/// `Welcome`: which store the peer serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// The store's fingerprint.
    pub fingerprint: Fingerprint,
    /// Length of its manifest.
    pub manifest_bytes: u64,
}

impl Welcome {
    /// Bytes of the body.
    pub const BYTES: usize = 40;

    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..32].copy_from_slice(&self.fingerprint.0);
        out[32..40].copy_from_slice(&self.manifest_bytes.to_le_bytes());
        out
    }

    /// Reads a body; `None` where the length is another's.
    #[must_use]
    pub fn decode(body: &[u8]) -> Option<Self> {
        let body: &[u8; Self::BYTES] = body.try_into().ok()?;
        let fingerprint = Fingerprint(field(body, 0));
        Some(Self { fingerprint, manifest_bytes: u64::from_le_bytes(field(body, 32)) })
    }
}

/// Bytes of a `Fetch` body.
pub const FETCH_BYTES: usize = 8;

/// The body of a `Fetch`: layer and expert.
#[must_use]
pub fn encode_fetch(key: ExpertKey) -> [u8; FETCH_BYTES] {
    let mut out = [0; FETCH_BYTES];
    out[0..4].copy_from_slice(&key.layer.to_le_bytes());
    out[4..8].copy_from_slice(&key.expert.to_le_bytes());
    out
}

/// Reads a `Fetch` body; whether the store has the key is for the store to say.
#[must_use]
pub fn decode_fetch(body: &[u8; FETCH_BYTES]) -> ExpertKey {
    ExpertKey::new(u32::from_le_bytes(field(body, 0)), u32::from_le_bytes(field(body, 4)))
}

/// `N` bytes of a body of checked length, at a constant offset inside it.
fn field<const N: usize>(body: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&body[at..at + N]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hellos_are_frozen() {
        let hello = ClientHello {
            min_version: 1,
            max_version: 2,
            capabilities: 3,
            client_id: *b"client-id-16byte",
            nonce: [7; 32],
        };
        let mut bytes = b"MTRLPEER\x01\0\x02\0\x03\0\0\0client-id-16byte".to_vec();
        bytes.extend([7; 32]);
        assert_eq!(hello.encode().to_vec(), bytes);
        assert_eq!(ClientHello::decode(&bytes), Some(hello));

        let hello =
            ServerHello { version: 1, auth: Auth::SharedSecret, capabilities: 4, nonce: [9; 32] };
        let mut bytes = b"MTRLPEER\x01\0\x01\0\x04\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        bytes.extend([9; 32]);
        assert_eq!(hello.encode().to_vec(), bytes);
        assert_eq!(ServerHello::decode(&bytes), Some(hello));
    }

    #[test]
    fn welcome_and_fetch_are_frozen() {
        let welcome = Welcome { fingerprint: Fingerprint([5; 32]), manifest_bytes: 0x0304 };
        let mut bytes = vec![5; 32];
        bytes.extend([4, 3, 0, 0, 0, 0, 0, 0]);
        assert_eq!(welcome.encode().to_vec(), bytes);
        assert_eq!(Welcome::decode(&bytes), Some(welcome));

        let body = encode_fetch(ExpertKey::new(0x0102, 3));
        assert_eq!(body, [2, 1, 0, 0, 3, 0, 0, 0]);
        assert_eq!(decode_fetch(&body), ExpertKey::new(0x0102, 3));
    }

    #[test]
    fn another_magic_length_or_proof_is_not_a_hello() {
        let mut hello =
            ServerHello { version: 1, auth: Auth::None, capabilities: 0, nonce: [0; 32] }.encode();
        assert!(ServerHello::decode(&hello[1..]).is_none());
        hello[10] = 9;
        assert!(ServerHello::decode(&hello).is_none());
        assert!(ClientHello::decode(&[0; 64]).is_none());
    }

    #[test]
    fn a_server_hello_with_a_reserved_byte_set_is_none() {
        let hello =
            ServerHello { version: 1, auth: Auth::None, capabilities: 0, nonce: [0; 32] }.encode();
        assert!(ServerHello::decode(&hello).is_some());
        for at in [11, 16, 17, 18, 19, 20, 21, 22, 23] {
            let mut reserved = hello;
            reserved[at] = 1;
            assert!(ServerHello::decode(&reserved).is_none(), "byte {at}");
        }
    }
}
