//! Why no rail can be had, and what to do about it.

/// No rail can be had.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum ChooseError {
    /// The host has no RDMA device.
    #[error("this host has no RDMA device: see `ibv_devices`, and load the adapter's driver")]
    NoDevice,
    /// No port carries data.
    #[error("no RDMA port is active ({ports}): connect it and bring its interface up")]
    NoActivePort {
        /// The ports, and what they are instead.
        ports: String,
    },
    /// The only addresses are IPv6 link-local ones.
    #[error(
        "the active RDMA ports have link-local GIDs only ({there}): give their interface an \
         address that the peer can reach"
    )]
    OnlyLinkLocal {
        /// The GIDs.
        there: String,
    },
    /// No GID reaches the peer.
    #[error(
        "no GID of an active RDMA port can carry this rail ({there}): give its interface an \
         address of the peer's family, or name another with {device_knob} and {gid_knob}"
    )]
    NoRoutableGid {
        /// The GIDs, and what is wrong with each.
        there: String,
        /// The setting that names the device.
        device_knob: &'static str,
        /// The setting that names the GID.
        gid_knob: &'static str,
    },
    /// The named device is not there.
    #[error(
        "{knob} names {wished:?}, which is neither an RDMA device nor a network interface of one; \
         there are: {there}"
    )]
    WishedDeviceMissing {
        /// The name.
        wished: String,
        /// The setting.
        knob: &'static str,
        /// The devices there are, with their interfaces.
        there: String,
    },
    /// The named device has no active port.
    #[error("{knob} names {wished:?}, whose port is not active: {ports}")]
    WishedDeviceDown {
        /// The name.
        wished: String,
        /// The setting.
        knob: &'static str,
        /// Its ports.
        ports: String,
    },
    /// No active port has the named GID.
    #[error("{knob} names GID {wished}, which no active port has; there are: {there}")]
    WishedGidMissing {
        /// The index.
        wished: u8,
        /// The setting.
        knob: &'static str,
        /// The GIDs there are.
        there: String,
    },
    /// The named GID cannot carry the rail.
    #[error("{knob} names GID {wished}, which cannot be used: {reasons}; there are: {there}")]
    WishedGidUnusable {
        /// The index.
        wished: u8,
        /// The setting.
        knob: &'static str,
        /// Why, for each port that has it.
        reasons: String,
        /// The GIDs there are.
        there: String,
    },
}
