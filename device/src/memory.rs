//! Memory of a device, and parts of it.
//!
//! Invariant: a buffer keeps its device open, and a view its buffer, so an address that reaches a kernel is good.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Argument, Handle, Use};
use crate::device::Inner;
use crate::element::Element;
use crate::error::{DeviceError, Result};

/// Values on a device, freed when this goes.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    inner: Arc<Inner>,
    label: &'static str,
    address: u64,
    len: usize,
    origin: Origin,
    values: PhantomData<T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Allocated(Use),
    /// Another process has allocated it.
    Opened,
}

/// Some values of a buffer.
#[derive(Debug)]
pub struct View<'a, T: Element> {
    address: u64,
    len: usize,
    values: PhantomData<&'a T>,
}

/// Some values of a buffer, to be written.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element> {
    address: u64,
    len: usize,
    values: PhantomData<&'a mut T>,
}

impl<T: Element> Buffer<T> {
    pub(crate) fn allocate(inner: &Arc<Inner>, label: &'static str, len: usize, usage: Use) -> Result<Self> {
        let address = inner.allocate(len * size_of::<T>(), label, usage)?;
        let (inner, origin) = (Arc::clone(inner), Origin::Allocated(usage));
        Ok(Self { inner, label, address, len, origin, values: PhantomData })
    }

    pub(crate) fn opened(inner: &Arc<Inner>, address: u64, len: usize) -> Self {
        let (inner, origin) = (Arc::clone(inner), Origin::Opened);
        Self { inner, label: "other processes", address, len, origin, values: PhantomData }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// What tells this buffer from all others that live.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.address
    }

    /// All values.
    #[must_use]
    pub fn all(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, values: PhantomData }
    }

    /// All values, to be written.
    pub fn all_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, values: PhantomData }
    }

    /// Some values.
    ///
    /// # Panics
    /// If they lie beyond the end.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> View<'_, T> {
        self.all().slice(range)
    }

    /// Some values, to be written.
    ///
    /// # Panics
    /// If they lie beyond the end.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        let View { address, len, .. } = self.all().slice(range);
        ViewMut { address, len, values: PhantomData }
    }

    /// What another process opens this buffer with.
    ///
    /// # Errors
    /// If the buffer was not made to be shared.
    pub fn handle(&self) -> Result<Handle> {
        if self.origin == Origin::Allocated(Use::Shared) && self.len > 0 {
            return self.inner.backend.share(self.address);
        }
        Err(DeviceError::Unavailable {
            device: self.inner.backend.name(),
            reason: "this memory was not allocated for other processes".to_owned(),
        })
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        match self.origin {
            _ if bytes == 0 => {}
            Origin::Allocated(usage) => self.inner.free(self.address, bytes, self.label, usage),
            Origin::Opened => self.inner.backend.close(self.address, bytes),
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

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Some of them.
    ///
    /// # Panics
    /// If they lie beyond the end.
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

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same, to be read.
    #[must_use]
    pub fn as_view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, values: PhantomData }
    }

    /// The same, for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, values: PhantomData }
    }

    /// Some of them.
    ///
    /// # Panics
    /// If they lie beyond the end.
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
