//! The shared secret, and what proves that an end knows it.
//!
//! Each end sends HMAC-SHA256(secret, role label || SHA-256 of every handshake byte so far). Both
//! nonces are among those bytes, so a proof is good for one connection; the labels differ, so one
//! end's proof cannot be sent back to it. What follows the handshake is neither encrypted nor
//! authenticated: the secret keeps strangers out, not somebody who can alter packets.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// Fewest bytes of a secret.
pub const MIN_SECRET_BYTES: usize = 16;
/// Most bytes of a secret file.
pub const MAX_SECRET_BYTES: usize = 4096;

/// Which end made a proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The end that connected.
    Client,
    /// The end that accepted.
    Server,
}

impl Role {
    fn label(self) -> &'static [u8] {
        match self {
            Self::Client => b"metrale expert protocol 1 client",
            Self::Server => b"metrale expert protocol 1 server",
        }
    }
}

/// A shared secret. Never printed.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file could not be read.
    #[error("cannot read the secret file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Too short to be one, or too long to be meant.
    #[error(
        "a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, this one has {}: \
         make one with `head -c 32 /dev/urandom | base64`", told(*found)
    )]
    Length {
        /// Bytes without the line ends at the end; of a file that is too long, those read.
        found: usize,
    },
}

/// A file is not read past what a secret may have, so how long a longer one is stays unknown.
fn told(found: usize) -> String {
    if found > MAX_SECRET_BYTES {
        format!("more than {MAX_SECRET_BYTES}")
    } else {
        found.to_string()
    }
}

impl Secret {
    /// Takes a secret's bytes as they are.
    ///
    /// # Errors
    /// Fewer than [`MIN_SECRET_BYTES`] or more than [`MAX_SECRET_BYTES`] bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, SecretError> {
        if !(MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&bytes.len()) {
            return Err(SecretError::Length { found: bytes.len() });
        }
        Ok(Self(bytes.into()))
    }

    /// Reads a secret from a file; line ends at its end do not count.
    ///
    /// # Errors
    /// The file cannot be read, or holds too few or too many bytes.
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let io = |source| SecretError::Io { path: path.to_owned(), source };
        let file = std::fs::File::open(path).map_err(io)?;
        let mut bytes = Vec::new();
        // Room for the longest secret and a line end, and one byte to tell that there is more.
        let most = MAX_SECRET_BYTES + 3;
        file.take(most as u64).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() == most {
            return Err(SecretError::Length { found: most });
        }
        while matches!(bytes.last(), Some(b'\n' | b'\r')) {
            bytes.pop();
        }
        Self::new(&bytes)
    }

    /// What `role` sends over a handshake whose bytes so far hash to `transcript`.
    #[must_use]
    pub fn proof(&self, role: Role, transcript: &[u8; 32]) -> [u8; PROOF_BYTES] {
        self.mac(role, transcript).finalize().into_bytes().into()
    }

    /// Whether `proof` is the one that `role` must send; takes the same time either way.
    #[must_use]
    pub fn accepts(&self, role: Role, transcript: &[u8; 32], proof: &[u8]) -> bool {
        self.mac(role, transcript).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: Role, transcript: &[u8; 32]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length (RFC 2104)"));
        mac.update(role.label());
        mac.update(transcript);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_role_and_one_transcript() {
        let secret = Secret::new(b"sixteen bytes ok").unwrap();
        let proof = secret.proof(Role::Client, &[1; 32]);
        assert!(secret.accepts(Role::Client, &[1; 32], &proof));
        assert!(!secret.accepts(Role::Server, &[1; 32], &proof));
        assert!(!secret.accepts(Role::Client, &[2; 32], &proof));
        assert!(!secret.accepts(Role::Client, &[1; 32], &proof[..31]));
        let other = Secret::new(b"sixteen bytes no").unwrap();
        assert!(!other.accepts(Role::Client, &[1; 32], &proof));
    }

    #[test]
    fn the_proof_bytes_are_frozen() {
        // python3: hmac.new(b"sixteen bytes ok",
        //     b"metrale expert protocol 1 client" + bytes([1] * 32), "sha256").hexdigest()
        let proof = Secret::new(b"sixteen bytes ok").unwrap().proof(Role::Client, &[1; 32]);
        let hex: String = proof.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "3de94a8bec502eddef141ddcf734ab33fe0c93b1a82e4d09752ae9362b13724b");
    }

    #[test]
    fn a_short_secret_is_refused_with_a_way_to_make_one() {
        let error = Secret::new(b"short").unwrap_err().to_string();
        assert!(error.contains("/dev/urandom"), "{error}");
        let shown = format!("{:?}", Secret::new(b"sixteen bytes ok").unwrap());
        assert_eq!(shown, "Secret(..)");
    }

    #[test]
    fn a_file_holds_a_secret_of_the_right_length_before_its_line_end() {
        let dir = tempfile::tempdir().unwrap();
        let read = |bytes: &[u8]| {
            let path = dir.path().join("secret");
            std::fs::write(&path, bytes).unwrap();
            Secret::read(&path).map_err(|error| error.to_string())
        };
        let longest = [b'x'; MAX_SECRET_BYTES];
        for end in [&b""[..], b"\n", b"\r\n"] {
            assert_eq!(read(&[&longest[..], end].concat()).unwrap().0[..], longest);
        }
        // The bytes after the line ends belong to it, though they were not read.
        for rest in [&b"x"[..], b"\n\n\nx", b"\n\n\n\n", &[b'x'; 9000]] {
            let error = read(&[&longest[..], rest].concat()).unwrap_err();
            assert!(error.contains("this one has more than 4096"), "{error}");
        }
        assert!(read(b"fifteen bytes..\n").unwrap_err().contains("this one has 15"));
    }
}
