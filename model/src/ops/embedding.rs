//! Embedding lookup, and its backward: scatter-add into the rows of the table.

use candle_core::{Result, Tensor, bail};

use super::{matrix, unwritten, values};

/// Row `ids[t]` of a table `[vocabulary, width]` for every token, of which the first is number `first` of its batch; `copy`
/// writes the row of token `t` and this id to `[width]` values.
///
/// # Errors
/// An id at or above `vocabulary`.
pub(crate) fn embed(
    ids: &[u32],
    first: usize,
    [vocabulary, width]: [usize; 2],
    copy: impl Fn(usize, usize, &mut [f32]),
) -> Result<Tensor> {
    let mut out = unwritten(ids.len() * width);
    for (t, (id, out)) in ids.iter().zip(out.chunks_exact_mut(width)).enumerate() {
        let id = *id as usize;
        if id >= vocabulary {
            bail!("token {} has id {id}, but the vocabulary ends at {vocabulary}", first + t)
        }
        copy(t, id, out);
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
