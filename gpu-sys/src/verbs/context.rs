//! An open device.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::error::{VerbsError, check};
use super::events::{self, AsyncEvent};
use super::ffi::{self, Zeroed};
use super::library::Library;
use super::port::{self, GidEntry, PortFacts};

/// What a device can do; counts are totals over the device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceLimits {
    /// Node GUID, as a number.
    pub node_guid: u64,
    /// Longest registration in bytes.
    pub max_mr_size: u64,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests in one queue of a queue pair.
    pub max_qp_wr: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Registrations.
    pub max_mr: u32,
    /// READs that a queue pair answers at once.
    pub max_qp_rd_atom: u32,
    /// READs that a queue pair may have asked for at once.
    pub max_qp_init_rd_atom: u32,
    /// Physical ports, numbered from 1.
    pub ports: u8,
}

/// An open device. Dropping it closes the device: everything made from it holds it, so nothing is
/// left by then.
#[derive(Debug)]
pub struct Context {
    library: Arc<Library>,
    raw: NonNull<ffi::ibv_context>,
    name: String,
    limits: DeviceLimits,
    /// The number of the device's directory in sysfs when it was opened; a device that is made anew
    /// under the same name has another.
    inode: Option<u64>,
}

// SAFETY: libibverbs is thread-safe (ibv_verbs manual, "All verbs are thread safe").
unsafe impl Send for Context {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Context {}

impl Context {
    /// Takes over `raw`, a device that was just opened.
    pub(super) fn from_raw(
        library: Arc<Library>,
        raw: NonNull<ffi::ibv_context>,
        name: &str,
    ) -> Result<Arc<Self>, VerbsError> {
        // From here on an early return closes the device.
        let mut context = Self {
            library,
            raw,
            name: name.to_owned(),
            limits: DeviceLimits::default(),
            inode: None,
        };
        context.limits = context.query_limits()?;
        context.inode = context.inode_now();
        let fd = context.as_fd();
        let non_blocking =
            fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        non_blocking.map_err(|error| VerbsError::Call {
            call: "fcntl(O_NONBLOCK)",
            on: format!("the event descriptor of {name}"),
            source: error.into(),
        })?;
        Ok(Arc::new(context))
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the device can do.
    #[must_use]
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// How port `port` is now; ports count from 1.
    ///
    /// # Errors
    /// There is no such port, or the device does not answer.
    pub fn port(&self, port: u8) -> Result<PortFacts, VerbsError> {
        self.check_port(port)?;
        let mut attributes = ffi::ibv_port_attr::zeroed();
        // SAFETY: the device is open, and the pointer is to a live local that is zeroed.
        let status = unsafe {
            (self.library.table.query_port)(self.raw.as_ptr(), port, &raw mut attributes)
        };
        check("ibv_query_port", status, format_args!("{} port {port}", self.name))?;
        Ok(PortFacts::from_raw(&attributes))
    }

    /// The GIDs of port `port`, without the table's empty places.
    ///
    /// # Errors
    /// There is no such port, or the device does not answer.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        let facts = self.port(port)?;
        let directory = self.sysfs().join(format!("ports/{port}/gid_attrs"));
        let mut found = Vec::new();
        for index in 0..facts.gid_table_len.min(port::MAX_GIDS) {
            let mut gid = ffi::ibv_gid::zeroed();
            let at = index.cast_signed();
            // SAFETY: the device is open, and the pointer is to a live local.
            let status = unsafe {
                (self.library.table.query_gid)(self.raw.as_ptr(), port, at, &raw mut gid)
            };
            // SAFETY: every byte of the union belongs to `raw`.
            let gid = unsafe { gid.raw };
            // A place may have been emptied since the table was measured: then it is not there.
            if status == 0 && gid != [0; 16] {
                found.push(port::gid_entry(index, gid, facts.link_layer, &directory));
            }
        }
        Ok(found)
    }

    /// Whether the device that was opened still has its name. A device that was taken out and made
    /// anew, or renamed, does not: it is to be opened again.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.inode == self.inode_now()
    }

    fn inode_now(&self) -> Option<u64> {
        std::fs::metadata(self.sysfs()).ok().map(|found| found.ino())
    }

    /// The NUMA node that the device hangs on, if the kernel says.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        // -1 is "none"; a software device has no such file.
        std::fs::read_to_string(self.sysfs().join("device/numa_node")).ok()?.trim().parse().ok()
    }

    /// The network interfaces that belong to the device, as far as the kernel says: those of its
    /// adapter's function, or the one that a software device was made on. None where a device
    /// has none, as on InfiniBand without IPoIB.
    #[must_use]
    pub fn interfaces(&self) -> Vec<String> {
        let listed = std::fs::read_dir(self.sysfs().join("device/net")).into_iter().flatten();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().ok();
        let mut found: Vec<_> = listed.flatten().filter_map(name).collect();
        if found.is_empty() {
            let parent = std::fs::read_to_string(self.sysfs().join("parent")).unwrap_or_default();
            found.extend(Some(parent.trim().to_owned()).filter(|parent| !parent.is_empty()));
        }
        found.sort();
        found
    }

    /// Takes the next event of the device, if there is one; never waits. `as_fd` is readable when
    /// there is one.
    ///
    /// # Errors
    /// The events cannot be read.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        events::next(&self.library.table, self.raw, &self.name)
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    /// Refuses a port that the device has not.
    pub(super) fn check_port(&self, port: u8) -> Result<(), VerbsError> {
        if port >= 1 && port <= self.limits.ports {
            return Ok(());
        }
        Err(VerbsError::Setting {
            what: "a port",
            value: port.into(),
            on: self.name.clone(),
            allowed: format!("1 to {}", self.limits.ports),
        })
    }

    fn sysfs(&self) -> PathBuf {
        // A name is one path component; another would not be a device's.
        self.library.sysfs.join(self.name.replace('/', "_"))
    }

    fn query_limits(&self) -> Result<DeviceLimits, VerbsError> {
        let mut attributes = ffi::ibv_device_attr::zeroed();
        // SAFETY: the device is open, and the pointer is to a live local.
        let status =
            unsafe { (self.library.table.query_device)(self.raw.as_ptr(), &raw mut attributes) };
        check("ibv_query_device", status, &self.name)?;
        let count = |value| u32::try_from(value).unwrap_or(0);
        Ok(DeviceLimits {
            node_guid: u64::from_be(attributes.node_guid),
            max_mr_size: attributes.max_mr_size,
            max_qp: count(attributes.max_qp),
            max_qp_wr: count(attributes.max_qp_wr),
            max_cq: count(attributes.max_cq),
            max_cqe: count(attributes.max_cqe),
            max_mr: count(attributes.max_mr),
            max_qp_rd_atom: count(attributes.max_qp_rd_atom),
            max_qp_init_rd_atom: count(attributes.max_qp_init_rd_atom),
            ports: attributes.phys_port_cnt,
        })
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is live; the field does not change while it is.
        let fd = unsafe { (*self.raw.as_ptr()).async_fd };
        // SAFETY: the descriptor is the context's own and is closed with it, in `drop`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once; what was made from it holds it, so nothing is left.
        let status = unsafe { (self.library.table.close_device)(self.raw.as_ptr()) };
        if let Err(error) = check("ibv_close_device", status, &self.name) {
            tracing::warn!(%error, "an RDMA device stays open");
        }
    }
}
