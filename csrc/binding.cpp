// The only file that knows Python: hf_ext.fm_delta._codec, buffers in and out, without the interpreter lock while it works.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <new>
#include <stdexcept>
#include <string>

#include "codec.h"
#include "symbol_model.h"

namespace {

// A buffer that is released when it goes out of scope.
struct Buffer {
    Py_buffer view{};
    ~Buffer() {
        if (view.obj) PyBuffer_Release(&view);
    }
    bool open(PyObject* object, int flags) {
        if (object == Py_None) return true;
        return PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS | flags) == 0;
    }
    size_t bytes() const { return size_t(view.len); }
};

// Runs work without the interpreter lock. False, with a Python exception set, if it throws.
template <class Work>
bool run(Work&& work) {
    std::string message;
    enum { OK, INVALID, CORRUPT, MEMORY } outcome = OK;
    Py_BEGIN_ALLOW_THREADS;
    try {
        work();
    } catch (const std::invalid_argument& error) {
        outcome = INVALID;
        message = error.what();
    } catch (const std::bad_alloc&) {
        outcome = MEMORY;
    } catch (const std::exception& error) {
        outcome = CORRUPT;
        message = error.what();
    }
    Py_END_ALLOW_THREADS;
    if (outcome == MEMORY) PyErr_NoMemory();
    if (outcome == INVALID) PyErr_SetString(PyExc_TypeError, message.c_str());
    if (outcome == CORRUPT) PyErr_SetString(PyExc_ValueError, message.c_str());
    return outcome == OK;
}

template <class T>
PyObject* to_bytes(const std::vector<T>& data) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data.data()), Py_ssize_t(data.size() * sizeof(T)));
}

void require_sizes(const fm_delta::Shape& shape, const Buffer& tensor, const Buffer& base) {
    fm_delta::check(shape);
    const size_t width = size_t(fm_delta::width(shape.dtype));
    if (tensor.bytes() / width != shape.values || tensor.bytes() % width) throw std::invalid_argument("the tensor's buffer has the wrong size");
    if (base.bytes() / width < shape.base_values) throw std::invalid_argument("the base's buffer is too small");
}

bool parse(PyObject* args, const char* format, Buffer& tensor, int tensor_flags, Buffer& base, fm_delta::Shape& shape, int& threads) {
    PyObject *tensor_object, *base_object;
    Py_ssize_t row_length, base_values;
    if (!PyArg_ParseTuple(args, format, &tensor_object, &base_object, &shape.dtype, &row_length, &base_values, &threads)) return false;
    if (!tensor.open(tensor_object, tensor_flags) || !base.open(base_object, 0)) return false;
    if (row_length < 1 || base_values < 0) {
        PyErr_SetString(PyExc_TypeError, "row_length must be positive and base_values must not be negative");
        return false;
    }
    const int width = fm_delta::width(shape.dtype);
    shape.row_length = size_t(row_length);
    shape.base_values = size_t(base_values);
    shape.values = width ? tensor.bytes() / size_t(width) : 0;
    return true;
}

PyObject* encode(PyObject*, PyObject* args) {
    Buffer tensor, base;
    fm_delta::Shape shape{};
    int threads = 1;
    if (!parse(args, "OOinn|i:encode", tensor, 0, base, shape, threads)) return nullptr;
    std::vector<uint8_t> body;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            body = fm_delta::encode(shape, tensor.view.buf, base.view.buf, threads);
        }))
        return nullptr;
    return to_bytes(body);
}

PyObject* count_symbols(PyObject*, PyObject* args) {
    Buffer tensor, base;
    fm_delta::Shape shape{};
    int threads = 1;
    if (!parse(args, "OOinn|i:count_symbols", tensor, 0, base, shape, threads)) return nullptr;
    std::vector<uint64_t> counts;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            counts = fm_delta::count_symbols(shape, tensor.view.buf, base.view.buf);
        }))
        return nullptr;
    return to_bytes(counts);
}

PyObject* decode(PyObject*, PyObject* args) {
    PyObject* body_object;
    PyObject* rest;
    Buffer body, tensor, base;
    fm_delta::Shape shape{};
    int threads = 1;
    if (!PyArg_ParseTuple(args, "OO!:decode", &body_object, &PyTuple_Type, &rest)) return nullptr;
    if (!body.open(body_object, 0) || !parse(rest, "OOinn|i:decode", tensor, PyBUF_WRITABLE, base, shape, threads)) return nullptr;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            fm_delta::decode(shape, static_cast<const uint8_t*>(body.view.buf), body.bytes(), base.view.buf, tensor.view.buf, threads);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* cast(PyObject*, PyObject* args) {
    PyObject *source_object, *target_object;
    Buffer source, target;
    int from, to;
    if (!PyArg_ParseTuple(args, "OiOi:cast", &source_object, &from, &target_object, &to)) return nullptr;
    if (!source.open(source_object, 0) || !target.open(target_object, PyBUF_WRITABLE)) return nullptr;
    if (!run([&] {
            const size_t from_width = size_t(fm_delta::width(from)), to_width = size_t(fm_delta::width(to));
            if (!from_width || !to_width) throw std::invalid_argument("unknown float type code");
            if (source.bytes() / from_width != target.bytes() / to_width) throw std::invalid_argument("the two buffers hold different numbers of values");
            fm_delta::cast(from, to, source.view.buf, target.view.buf, source.bytes() / from_width);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* default_tables(PyObject*, PyObject*) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(fm_delta::DEFAULT_TABLES.data()), sizeof fm_delta::DEFAULT_TABLES);
}

PyMethodDef METHODS[] = {
    {"encode", encode, METH_VARARGS, "encode(tensor, base | None, dtype, row_length, base_values, threads=1) -> body"},
    {"decode", decode, METH_VARARGS, "decode(body, (tensor, base | None, dtype, row_length, base_values, threads=1)): fills the tensor"},
    {"cast", cast, METH_VARARGS, "cast(source, from_dtype, target, to_dtype): fills the target, rounding to nearest even"},
    {"count_symbols", count_symbols, METH_VARARGS, "count_symbols(tensor, base | None, dtype, row_length, base_values) -> uint64 counts"},
    {"default_tables", default_tables, METH_NOARGS, "default_tables() -> uint16 frequencies, 33 tables of 64 symbols"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_codec", "The delta codec.", 0, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__codec() { return PyModuleDef_Init(&MODULE); }
