//! Buffers in device memory and views of them.
//!
//! Invariant: a buffer keeps its device open, and a view borrows its buffer, so every address that a kernel receives is
//! valid.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{AllocationKind, Argument, MemoryHandle};
use crate::device::DeviceInner;
use crate::element::Element;
use crate::error::{DeviceError, Result};

/// Values `[len]` in device memory, freed on drop.
#[derive(Debug)]
pub struct DeviceBuffer<T: Element> {
    inner: Arc<DeviceInner>,
    label: &'static str,
    address: u64,
    len: usize,
    origin: BufferOrigin,
    values: PhantomData<T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BufferOrigin {
    Allocated(AllocationKind),
    /// Allocated by another process.
    Opened,
}

/// A range of a buffer, `[len]`.
#[derive(Debug)]
pub struct View<'a, T: Element> {
    address: u64,
    len: usize,
    values: PhantomData<&'a T>,
}

/// A mutable range of a buffer, `[len]`.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element> {
    address: u64,
    len: usize,
    values: PhantomData<&'a mut T>,
}

impl<T: Element> DeviceBuffer<T> {
    pub(crate) fn allocate(
        inner: &Arc<DeviceInner>,
        label: &'static str,
        len: usize,
        usage: AllocationKind,
    ) -> Result<Self> {
        let address = inner.allocate(len * size_of::<T>(), label, usage)?;
        let (inner, origin) = (Arc::clone(inner), BufferOrigin::Allocated(usage));
        Ok(Self { inner, label, address, len, origin, values: PhantomData })
    }

    pub(crate) fn opened(inner: &Arc<DeviceInner>, address: u64, len: usize) -> Self {
        let (inner, origin) = (Arc::clone(inner), BufferOrigin::Opened);
        Self { inner, label: "other processes", address, len, origin, values: PhantomData }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// Unique among live buffers.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.address
    }

    /// View of all values, `[len]`.
    #[must_use]
    pub fn all(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, values: PhantomData }
    }

    /// Mutable view of all values, `[len]`.
    pub fn all_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, values: PhantomData }
    }

    /// View of the values `[range]`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> View<'_, T> {
        self.all().slice(range)
    }

    /// Mutable view of the values `[range]`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        let View { address, len, .. } = self.all().slice(range);
        ViewMut { address, len, values: PhantomData }
    }

    /// Handle with which another process opens this buffer.
    ///
    /// # Errors
    /// If the buffer was not allocated for sharing.
    pub fn handle(&self) -> Result<MemoryHandle> {
        if self.origin == BufferOrigin::Allocated(AllocationKind::Shared) && self.len > 0 {
            return self.inner.backend.share(self.address);
        }
        Err(DeviceError::Unavailable {
            device: self.inner.backend.name(),
            reason: "this memory was not allocated for other processes".to_owned(),
        })
    }
}

impl<T: Element> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        match self.origin {
            _ if bytes == 0 => {}
            BufferOrigin::Allocated(usage) => self.inner.free(self.address, bytes, self.label, usage),
            BufferOrigin::Opened => self.inner.backend.close(self.address, bytes),
        }
    }
}

impl<T: Element> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for View<'_, T> {}

impl<'a, T: Element> View<'a, T> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the view is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// View of the values `[range]`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        let (start, end, len) = (range.start, range.end, self.len);
        assert!(start <= end && end <= len, "values {start}..{end} of {len}");
        View {
            address: self.address + (start * size_of::<T>()) as u64,
            len: end - start,
            values: PhantomData,
        }
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }
}

impl<T: Element> ViewMut<'_, T> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the view is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Immutable view of the same values, `[len]`.
    #[must_use]
    pub fn as_view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, values: PhantomData }
    }

    /// Reborrows the view, `[len]`.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, values: PhantomData }
    }

    /// Mutable view of the values `[range]`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        let View { address, len, .. } = self.as_view().slice(range);
        ViewMut { address, len, values: PhantomData }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl<T: Element> From<View<'_, T>> for Argument {
    fn from(view: View<'_, T>) -> Self {
        view.address.into()
    }
}

impl<T: Element> From<ViewMut<'_, T>> for Argument {
    fn from(view: ViewMut<'_, T>) -> Self {
        view.address.into()
    }
}

impl<T: Element> From<&ViewMut<'_, T>> for Argument {
    fn from(view: &ViewMut<'_, T>) -> Self {
        view.address.into()
    }
}

impl<T: Element> From<Option<View<'_, T>>> for Argument {
    fn from(view: Option<View<'_, T>>) -> Self {
        view.map_or_else(Self::null, Self::from)
    }
}
