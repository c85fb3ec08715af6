//! Embedding lookup, and its backward: scatter-add into the rows of the table.

use candle_core::{Result, Tensor, bail};

use super::{matrix, values};

/// Row `ids[t]` of `table [V, d]` for every token, of which the first is number `first` of its batch.
///
/// # Errors
/// An id at or above `V`.
pub(crate) fn embed(ids: &[u32], first: usize, table: &[f32], width: usize) -> Result<Tensor> {
    let vocabulary = table.len() / width;
    let mut out = Vec::with_capacity(ids.len() * width);
    for (t, id) in ids.iter().enumerate() {
        let id = *id as usize;
        if id >= vocabulary {
            bail!("token {} has id {id}, but the vocabulary ends at {vocabulary}", first + t)
        }
        out.extend_from_slice(&table[id * width..(id + 1) * width]);
    }
    matrix(out, width)
}

/// Adds the gradient `g [T, d]` of the embedded tokens to `table_gradient [V, d]`.
pub(crate) fn embed_backward(ids: &[u32], g: &Tensor, table_gradient: &mut [f32]) -> Result<()> {
    let (_, width) = g.dims2()?;
    for (id, g) in ids.iter().zip(values(g)?.chunks_exact(width)) {
        let row = &mut table_gradient[*id as usize * width..][..width];
        row.iter_mut().zip(g).for_each(|(row, g)| *row += g);
    }
    Ok(())
}
