//! libibverbs, and the devices it finds.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::Context;
use super::error::VerbsError;
use super::ffi::{self, Table};

/// More devices than any machine has; a longer list is not one.
const MAX_DEVICES: usize = 1024;

/// The open library: where everything else comes from.
pub struct Library {
    pub(super) table: Table,
    /// `/sys/class/infiniband`.
    pub(super) sysfs: PathBuf,
}

/// A device that could be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceListing {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// Its node GUID, as a number; 0 where the device has none.
    pub node_guid: u64,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library(libibverbs)")
    }
}

impl Library {
    /// Opens libibverbs.
    ///
    /// # Errors
    /// It is not installed or not complete: what was tried, and what to install.
    pub fn open() -> Result<Arc<Self>, VerbsError> {
        Ok(Self::from_table(Table::load()?, Path::new("/sys/class/infiniband")))
    }

    /// A library of these functions, which describes its devices below `sysfs`.
    pub(super) fn from_table(table: Table, sysfs: &Path) -> Arc<Self> {
        Arc::new(Self { table, sysfs: sysfs.to_owned() })
    }

    /// The devices there are; none where the kernel has no verbs.
    ///
    /// # Errors
    /// The list cannot be made.
    pub fn devices(self: &Arc<Self>) -> Result<Vec<DeviceListing>, VerbsError> {
        let list = self.list()?;
        Ok(list.iter().map(|device| self.listing(device)).collect())
    }

    /// Opens the device of that name.
    ///
    /// # Errors
    /// There is none: the error names those there are. Or the device cannot be opened, for want of
    /// permission on `/dev/infiniband/uverbs*` most often.
    pub fn open_device(self: &Arc<Self>, name: &str) -> Result<Arc<Context>, VerbsError> {
        let list = self.list()?;
        let Some(device) = list.iter().find(|device| self.listing(*device).name == name) else {
            let found = list.iter().map(|device| self.listing(device).name).collect();
            return Err(VerbsError::NoSuchDevice { name: name.to_owned(), found });
        };
        // SAFETY: the device is of a list that has not been freed.
        let raw = unsafe { (self.table.open_device)(device.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_open_device", name))?;
        Context::from_raw(Arc::clone(self), raw, name)
    }

    fn list(&self) -> Result<List<'_>, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the pointer is to a live local.
        let raw = unsafe { (self.table.device_list)(&raw mut count) };
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            return match error.raw_os_error() {
                // ibv_get_device_list(3): "No kernel support for RDMA".
                Some(libc::ENOSYS) => Ok(List { library: self, raw: None, count: 0 }),
                _ => Err(VerbsError::Call {
                    call: "ibv_get_device_list",
                    on: "this machine".into(),
                    source: error,
                }),
            };
        };
        let count = usize::try_from(count).unwrap_or(0).min(MAX_DEVICES);
        Ok(List { library: self, raw: Some(raw), count })
    }

    fn listing(&self, device: NonNull<ffi::ibv_device>) -> DeviceListing {
        // SAFETY: the device is of a list that has not been freed.
        let name = unsafe { (self.table.device_name)(device.as_ptr()) };
        let name = match name.is_null() {
            true => String::new(),
            // SAFETY: the name is NUL-terminated and lives as long as the device.
            false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        };
        // SAFETY: as above.
        let guid = unsafe { (self.table.device_guid)(device.as_ptr()) };
        DeviceListing { name, node_guid: u64::from_be(guid) }
    }
}

/// What `ibv_get_device_list` gave, freed when dropped; contexts opened from it stay.
struct List<'a> {
    library: &'a Library,
    raw: Option<NonNull<*mut ffi::ibv_device>>,
    count: usize,
}

impl List<'_> {
    fn iter(&self) -> impl Iterator<Item = NonNull<ffi::ibv_device>> {
        let raw = self.raw;
        (0..self.count).filter_map(move |index| {
            // SAFETY: the list has `count` entries.
            let entry = unsafe { raw?.add(index) };
            // SAFETY: as above, and it is freed only in `drop`.
            NonNull::new(unsafe { entry.read() })
        })
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        if let Some(raw) = self.raw {
            // SAFETY: it came from `ibv_get_device_list` and is freed once.
            unsafe { (self.library.table.free_device_list)(raw.as_ptr()) };
        }
    }
}
