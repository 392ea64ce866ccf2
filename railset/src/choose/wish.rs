//! What the user asked for, and which settings say so.

use std::str::FromStr;

use crate::facts::DeviceFacts;
use crate::message::MAX_NAME_BYTES;

/// What the user wants of a rail; whatever is not given is chosen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Wish {
    /// The name of a device, or of a network interface of one; a device's name goes first.
    pub device: Option<String>,
    /// The index in a port's GID table.
    pub gid_index: Option<u8>,
}

impl Wish {
    /// Whether nothing is wished.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The network interface that is wished for: a name that none of `devices` has.
    #[must_use]
    pub fn interface(&self, devices: &[DeviceFacts]) -> Option<&str> {
        let name = self.device.as_deref()?;
        (!devices.iter().any(|device| device.name == name)).then_some(name)
    }

    /// Whether `device`, one of `devices`, may carry the rail.
    #[must_use]
    pub fn is_for(&self, device: &DeviceFacts, devices: &[DeviceFacts]) -> bool {
        match (&self.device, self.interface(devices)) {
            (None, _) => true,
            (_, Some(interface)) => device.has_interface(interface),
            (Some(name), None) => *name == device.name,
        }
    }
}

/// A text that is not `DEV[:GID]`, where `DEV` is a device or a network interface.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[error(
    "{reason}; a rail is DEV or DEV:GID, as in mlx5_0:3, with the name of an RDMA device or of its network \
     interface, and a GID index of 0 to 255"
)]
pub struct WishError {
    reason: String,
}

impl FromStr for Wish {
    type Err = WishError;

    fn from_str(text: &str) -> Result<Self, WishError> {
        let error = |reason: &str| WishError { reason: reason.into() };
        let (device, gid) = match text.split_once(':') {
            Some((device, gid)) => (device, Some(gid)),
            None => (text, None),
        };
        if device.is_empty() {
            return Err(error("the device's name is missing"));
        }
        if device.len() > MAX_NAME_BYTES || device.contains(|c: char| c == '/' || c.is_control()) {
            return Err(error("this is not a device's name"));
        }
        let index = |gid: &str| gid.parse().map_err(|_| error("the GID index is not a number"));
        Ok(Self { device: Some(device.into()), gid_index: gid.map(index).transpose()? })
    }
}

/// Whose rail is chosen: errors name the settings that belong to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asker {
    /// The client's first rail.
    Rail1,
    /// The client's second rail.
    Rail2,
    /// One of the peer's rails.
    Peer,
}

impl Asker {
    /// The setting that names the device.
    #[must_use]
    pub fn device_knob(self) -> &'static str {
        match self {
            Self::Rail1 => "METRALE_EXPERT_RDMA_DEV",
            Self::Rail2 => "METRALE_EXPERT_RAIL2_DEV",
            Self::Peer => "--rail DEV[:GID]",
        }
    }

    /// The setting that names the GID.
    #[must_use]
    pub fn gid_knob(self) -> &'static str {
        match self {
            Self::Rail1 => "METRALE_EXPERT_RDMA_GID",
            Self::Rail2 => "METRALE_EXPERT_RAIL2_GID",
            Self::Peer => "--rail DEV[:GID]",
        }
    }
}
