//! Packed cnorm models and their streams. A [`Model`] is immutable and shared by threads; a [`Stream`] belongs to one at
//! a time. cnorm_model.h is the manual of the C functions below this.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ffi::{c_void, CStr};
use std::{fmt, mem, ptr, sync::Arc};

mod ffi;

/// An error of the library. Displayed, it is one English sentence.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Error {
    /// A `cnorm_status`, or `Error::MEMORY`. cnorm_model.h says which a function returns; those that depend on bytes are
    /// constants here.
    pub status: i32,
    /// Of a packed model: which layer is at fault, counted from 0 in its network, and which member of it.
    pub layer: Option<u32>,
    pub field: Option<&'static str>,
}

impl Error {
    /// There is not enough memory.
    pub const MEMORY: i32 = -1;
    /// A packed model whose steps would take far more memory than its file.
    pub const SIZE: i32 = 2;
    /// A layer of a packed model that can't be run, or an array outside the file.
    pub const LAYER: i32 = 7;
    /// A value is not finite.
    pub const VALUE: i32 = 8;
    /// Not a packed model or saved stream, or one of another version or byte order.
    pub const FORMAT: i32 = 9;
    /// A packed model or saved stream of which bytes were changed, lost or added.
    pub const DAMAGED: i32 = 10;
    /// A saved stream of another model.
    pub const IDENTITY: i32 = 11;
    /// A token id in x is not an integer from 0 to the number of tokens less 1; nothing was stepped.
    pub const TOKEN: i32 = 14;
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.status == Error::MEMORY {
            return f.write_str("there is not enough memory");
        }
        // SAFETY: never NULL, and static
        f.write_str(&unsafe { CStr::from_ptr(ffi::cnorm_strerror(self.status)) }.to_string_lossy())?;
        match (self.layer, self.field) {
            (Some(layer), Some(field)) => write!(f, " (layer {layer}, {field})"),
            (Some(layer), None) => write!(f, " (layer {layer})"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

fn check(status: i32) -> Result<(), Error> {
    if status == 0 {
        Ok(())
    } else {
        Err(Error { status, layer: None, field: None })
    }
}

/// The error with the place that `cnorm_model_open` found.
fn located(error: Error, fault: &ffi::Fault) -> Error {
    let field = if fault.field.is_null() {
        None
    } else {
        // SAFETY: a constant string of the library
        unsafe { CStr::from_ptr(fault.field) }.to_str().ok()
    };
    Error { layer: u32::try_from(fault.layer).ok(), field, ..error }
}

/// Zeroed memory, aligned to 64 bytes.
struct Memory {
    at: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize) -> Result<Memory, Error> {
        let none = Error { status: Error::MEMORY, layer: None, field: None };
        let layout = Layout::from_size_align(bytes.max(1), 64).map_err(|_| none)?;
        // SAFETY: the size is not 0
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            return Err(none);
        }
        Ok(Memory { at, layout })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout
        unsafe { dealloc(self.at, self.layout) }
    }
}

struct Open {
    model: ffi::Model,
    _file: Memory,
    _tables: Memory,
}

/// An open model; a clone shares it.
#[derive(Clone)]
pub struct Model(Arc<Open>);

// SAFETY: nothing writes to a model after it was opened
unsafe impl Send for Open {}
unsafe impl Sync for Open {}

impl Model {
    /// Opens a packed model, which may come from an untrusted source. The bytes are copied once, to align them.
    ///
    /// # Panics
    /// If the linked library has another ABI version than this crate, as one in CNORM_LIB_DIR may.
    pub fn from_bytes(bytes: &[u8]) -> Result<Model, Error> {
        // SAFETY: has no arguments
        let version = unsafe { ffi::cnorm_abi_version() };
        assert_eq!(version, ffi::CNORM_ABI_VERSION, "ABI versions of the linked libcnorm and of this crate");
        let file = Memory::new(bytes.len())?;
        // SAFETY: the memory has that many bytes; open checks everything that it reads
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), file.at, bytes.len());
            let needed = ffi::cnorm_model_memory(file.at as *const c_void, bytes.len() as isize);
            let tables = Memory::new(needed as usize)?;
            let mut model: ffi::Model = mem::zeroed();
            let at = file.at as *const c_void;
            let mut fault: ffi::Fault = mem::zeroed();
            let status =
                ffi::cnorm_model_open(at, bytes.len() as isize, tables.at as *mut c_void, needed, &mut model, &mut fault);
            check(status).map_err(|error| located(error, &fault))?;
            Ok(Model(Arc::new(Open { model, _file: file, _tables: tables })))
        }
    }

    pub fn inputs(&self) -> usize {
        self.0.model.inputs as usize
    }

    pub fn outputs(&self) -> usize {
        self.0.model.outputs as usize
    }

    /// A stream in the initial state; an error for a model with a bidirectional layer.
    pub fn stream(&self) -> Result<Stream, Error> {
        // SAFETY: the memory has the size that cnorm_stream_floats says, and the model outlives the stream
        unsafe {
            let memory = Memory::new(4 * ffi::cnorm_stream_floats(&self.0.model, 1) as usize)?;
            let mut stream: ffi::Stream = mem::zeroed();
            check(ffi::cnorm_stream_start(&mut stream, &self.0.model, memory.at as *mut f32, 1))?;
            Ok(Stream { stream, model: self.clone(), _memory: memory })
        }
    }
}

// with the sentence, because a `main` that returns the error prints it by Debug
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("status", &self.status)
            .field("message", &self.to_string()).finish()
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (inputs, outputs) = (self.inputs(), self.outputs());
        f.debug_struct("Model").field("inputs", &inputs).field("outputs", &outputs).finish_non_exhaustive()
    }
}

/// One sequence, step by step.
pub struct Stream {
    stream: ffi::Stream,
    model: Model,
    _memory: Memory,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("model", &self.model).field("frames", &self.frames()).finish_non_exhaustive()
    }
}

// SAFETY: its memory is its own
unsafe impl Send for Stream {}

impl Stream {
    /// One step: x [inputs] -> y [outputs].
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn step(&mut self, x: &[f32], y: &mut [f32]) -> Result<(), Error> {
        assert_eq!((x.len(), y.len()), (self.model.inputs(), self.model.outputs()), "lengths of x and y");
        // SAFETY: the slices have the lengths that the model says
        check(unsafe { ffi::cnorm_stream_run(&mut self.stream, 1, x.as_ptr(), y.as_mut_ptr()) })
    }

    pub fn reset(&mut self) {
        // SAFETY: the stream was started
        unsafe { ffi::cnorm_stream_reset(&mut self.stream) }
    }

    /// Whether no value of the state is a NaN or an infinity, as one in x leaves behind.
    pub fn is_finite(&self) -> bool {
        // SAFETY: the stream was started
        unsafe { ffi::cnorm_stream_finite(&self.stream) != 0 }
    }

    /// Steps since the start or the last reset.
    pub fn frames(&self) -> u64 {
        self.stream.frames
    }

    /// The bytes of Python's `Stream.save` and `Model.restore`.
    pub fn save(&self) -> Result<Vec<u8>, Error> {
        // SAFETY: the vector has the size that cnorm_stream_saved_bytes says
        unsafe {
            let size = ffi::cnorm_stream_saved_bytes(&self.model.0.model) as usize;
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(size).map_err(|_| Error { status: Error::MEMORY, layer: None, field: None })?;
            bytes.resize(size, 0);
            check(ffi::cnorm_stream_save(&self.stream, bytes.as_mut_ptr() as *mut c_void))?;
            Ok(bytes)
        }
    }

    /// Takes over a saved state, which may come from an untrusted source; on an error the stream is unchanged.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), Error> {
        // SAFETY: restore reads `len` bytes
        check(unsafe { ffi::cnorm_stream_restore(&mut self.stream, bytes.as_ptr() as *const c_void, bytes.len() as isize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_model_is_refused() {
        let error = Model::from_bytes(&[0; 1000]).unwrap_err();
        assert_eq!(error.status, Error::FORMAT);
        assert!(error.to_string().contains("not a packed model"));
    }
}
