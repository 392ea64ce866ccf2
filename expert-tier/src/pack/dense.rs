//! The tensors of a checkpoint that no record holds: what a runtime must load itself.
//!
//! Their names are not kept while a pack is planned, so the headers are read once more.

use rustix::fs::OFlags;
use serde::Serialize;

use super::header::read_header;
use super::names::{Place, classify};
use super::source::Content;
use super::{PackError, PackPlan};
use crate::files::open_regular;

/// A tensor that stays in the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DenseTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its element type, as the shard spells it.
    pub dtype: String,
    /// Its dimensions; empty for a scalar.
    pub shape: Vec<u64>,
    /// Its length in the shard.
    pub bytes: u64,
    /// The file that holds it, within the checkpoint.
    pub shard: String,
}

impl PackPlan {
    /// Calls `each` with every tensor of the checkpoint's shards that no record holds: dense weights,
    /// shared experts, routers, and the routed experts of [`left_dense`](Self::left_dense). Shard by
    /// shard in order of their names, and in each as its header lists them. A synthetic plan has none.
    ///
    /// # Errors
    /// A shard cannot be read, or is not as it was when the plan was made.
    pub fn dense_tensors(&self, mut each: impl FnMut(DenseTensor)) -> Result<(), PackError> {
        let Content::Shards(content) = &self.content else { return Ok(()) };
        for shard in &content.shards {
            let path = content.dir.join(&shard.name);
            read_header(&path, &shard.name, |name, entry, _| {
                // What could not be classified was refused by the plan.
                let packed = matches!(classify(&name, entry.shape.len()),
                    Ok(Place { layer: Some((tree, _)), role: Some(_), .. }) if tree == content.main);
                if !packed {
                    let (bytes, shard) = (entry.bytes(), shard.name.clone());
                    each(DenseTensor {
                        name,
                        dtype: entry.dtype,
                        shape: entry.shape,
                        bytes,
                        shard,
                    });
                }
                Ok(())
            })?;
            let file = open_regular(&path, OFlags::RDONLY).map_err(PackError::io("open", &path))?;
            shard.check_unchanged(&file, &content.dir)?;
        }
        Ok(())
    }
}
