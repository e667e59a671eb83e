// The Python module hf_ext._native: takes and fills buffers, and releases the interpreter lock while it works. No other file
// uses Python. hf_ext/_native.pyi lists the functions.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <chrono>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/floats.h"
#include "common/instruction_sets.h"
#include "common/threads.h"
#include "delta/coarse.h"
#include "delta/codec.h"
#include "delta/codes.h"
#include "delta/geometric_tables.h"
#include "delta/symbol_model.h"
#include "delta/weighted_fit.h"
#include "emr/emr.h"

namespace hf_ext {
namespace {

// A buffer that is released at the end of its scope.
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

struct Stopped {};  // thrown where a Python exception is set

PyObject* check_function = nullptr;  // what `check_with` received

// Runs work without the interpreter lock. If it throws, sets a Python exception and returns false. Ten times a second it looks
// for signals and calls the check function: either may raise to stop the work. With `whole`, nothing stops it.
template <class Work>
bool run(Work&& work, bool whole = false) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds PERIOD{100};
    std::string message;
    enum { OK, INVALID, CORRUPT, MEMORY, STOPPED } outcome = OK;
    PyThreadState* state = PyEval_SaveThread();
    Clock::time_point next = Clock::now() + PERIOD;
    const std::function<void()> check = [&] {
        if (Clock::now() < next) return;
        PyEval_RestoreThread(state);
        PyObject* result = nullptr;
        if (PyErr_CheckSignals() == 0) result = check_function ? PyObject_CallNoArgs(check_function) : Py_NewRef(Py_None);
        Py_XDECREF(result);
        next = Clock::now() + PERIOD;
        state = PyEval_SaveThread();
        if (!result) throw Stopped{};
    };
    check_of_this_thread() = whole ? nullptr : &check;
    try {
        work();
    } catch (const Stopped&) {
        outcome = STOPPED;
    } catch (const std::invalid_argument& error) {
        outcome = INVALID;
        message = error.what();
    } catch (const std::bad_alloc&) {
        outcome = MEMORY;
    } catch (const std::exception& error) {
        outcome = CORRUPT;
        message = error.what();
    }
    check_of_this_thread() = nullptr;
    PyEval_RestoreThread(state);
    if (outcome == MEMORY) PyErr_NoMemory();
    if (outcome == INVALID) PyErr_SetString(PyExc_TypeError, message.c_str());
    if (outcome == CORRUPT) PyErr_SetString(PyExc_ValueError, message.c_str());
    return outcome == OK;
}

template <class T>
PyObject* to_bytes(const std::vector<T>& data) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data.data()), Py_ssize_t(data.size() * sizeof(T)));
}

void require_sizes(const delta::Shape& shape, const Buffer& tensor, const Buffer& base) {
    delta::check(shape);
    const size_t width = size_t(hf_ext::width(shape.dtype));
    if (tensor.bytes() / width != shape.values || tensor.bytes() % width)
        throw std::invalid_argument("the tensor's buffer has the wrong size");
    if (base.bytes() / width < shape.base_values) throw std::invalid_argument("the base's buffer is too small");
}

// Parses the arguments of `encode`. `more` receives the last one if the format has it.
bool parse(PyObject* args, const char* format, Buffer& tensor, int tensor_flags, Buffer& base, delta::Shape& shape,
           int& threads, PyObject** more = nullptr) {
    PyObject *tensor_object, *base_object;
    Py_ssize_t row_length, base_values;
    if (!PyArg_ParseTuple(args, format, &tensor_object, &base_object, &shape.dtype, &row_length, &base_values, &threads, more))
        return false;
    if (!tensor.open(tensor_object, tensor_flags) || !base.open(base_object, 0)) return false;
    if (row_length < 1 || base_values < 0) {
        PyErr_SetString(PyExc_TypeError, "row_length must be positive and base_values must not be negative");
        return false;
    }
    const int width = hf_ext::width(shape.dtype);
    shape.row_length = size_t(row_length);
    shape.base_values = size_t(base_values);
    shape.values = width ? tensor.bytes() / size_t(width) : 0;
    return true;
}

// Parses one candidate: a tuple of rows (int32, base rows × rank), columns (int32, rank × row length) and the exponent.
bool parse(PyObject* object, const delta::Shape& shape, Buffer& rows, Buffer& columns, delta::Factors& factors) {
    PyObject *rows_object, *columns_object;
    if (!PyTuple_Check(object) || !PyArg_ParseTuple(object, "OOi", &rows_object, &columns_object, &factors.exponent)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a candidate must be a tuple");
        return false;
    }
    if (!rows.open(rows_object, 0) || !columns.open(columns_object, 0)) return false;
    const size_t row = sizeof(int32_t) * shape.row_length, rank = columns.bytes() / row;
    const size_t row_count = (shape.base_values + shape.row_length - 1) / shape.row_length;
    if (rank == 0 || rank > 1024 || columns.bytes() % row || rows.bytes() != rank * row_count * sizeof(int32_t)) {
        PyErr_SetString(PyExc_TypeError, "the factors' buffers have the wrong sizes");
        return false;
    }
    factors.rank = int(rank);
    factors.rows = static_cast<const int32_t*>(rows.view.buf);
    factors.columns = static_cast<const int32_t*>(columns.view.buf);
    return true;
}

PyObject* encode(PyObject*, PyObject* args) {
    Buffer tensor, base;
    delta::Shape shape{};
    int threads = 1;
    PyObject* tuple = nullptr;
    if (!parse(args, "OOinn|iO:encode", tensor, 0, base, shape, threads, &tuple)) return nullptr;
    const size_t count = tuple && PyTuple_Check(tuple) ? size_t(PyTuple_Size(tuple)) : 0;
    std::vector<Buffer> buffers(2 * count);
    std::vector<delta::Factors> candidates(count);
    for (size_t i = 0; i < count; ++i)
        if (!parse(PyTuple_GetItem(tuple, Py_ssize_t(i)), shape, buffers[2 * i], buffers[2 * i + 1], candidates[i]))
            return nullptr;
    std::vector<uint8_t> body;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            body = delta::encode(shape, tensor.view.buf, base.view.buf, candidates, threads);
        }))
        return nullptr;
    return to_bytes(body);
}

PyObject* encode_coarse(PyObject*, PyObject* args) {
    Buffer tensor, base, rows, columns;
    delta::Shape shape{};
    delta::Factors factors;
    delta::Coarse coarse;
    int threads = 1;
    PyObject *tuple = nullptr, *candidate = nullptr;
    if (!parse(args, "OOinniO:encode_coarse", tensor, 0, base, shape, threads, &tuple)) return nullptr;
    if (!PyArg_ParseTuple(tuple, "ffO:encode_coarse", &coarse.step, &coarse.threshold, &candidate) ||
        (candidate != Py_None && !parse(candidate, shape, rows, columns, factors)))
        return nullptr;
    std::vector<uint8_t> body;
    size_t numbers = 0;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            body = delta::encode_coarse(shape, tensor.view.buf, base.view.buf, factors, coarse, threads, numbers);
        }))
        return nullptr;
    return Py_BuildValue("(Nn)", to_bytes(body), Py_ssize_t(numbers));
}

PyObject* count_symbols(PyObject*, PyObject* args) {
    Buffer tensor, base;
    delta::Shape shape{};
    int threads = 1;
    if (!parse(args, "OOinn|i:count_symbols", tensor, 0, base, shape, threads)) return nullptr;
    std::vector<uint64_t> counts;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            counts = delta::count_symbols(shape, tensor.view.buf, base.view.buf);
        }))
        return nullptr;
    return to_bytes(counts);
}

PyObject* decode(PyObject*, PyObject* args) {
    PyObject* body_object;
    PyObject* rest;
    Buffer body, tensor, base;
    delta::Shape shape{};
    int threads = 1;
    if (!PyArg_ParseTuple(args, "OO!:decode", &body_object, &PyTuple_Type, &rest)) return nullptr;
    if (!body.open(body_object, 0) || !parse(rest, "OOinn|i:decode", tensor, PyBUF_WRITABLE, base, shape, threads))
        return nullptr;
    if (!run([&] {
            require_sizes(shape, tensor, base);
            delta::decode(shape, static_cast<const uint8_t*>(body.view.buf), body.bytes(), base.view.buf, tensor.view.buf,
                          threads);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* list_changes(PyObject*, PyObject* args) {
    PyObject *body_object, *base_object;
    Buffer body, base;
    delta::Shape shape{};
    Py_ssize_t row_length;
    int threads = 1;
    if (!PyArg_ParseTuple(args, "OOin|i:list_changes", &body_object, &base_object, &shape.dtype, &row_length, &threads))
        return nullptr;
    if (!body.open(body_object, 0) || !base.open(base_object, 0)) return nullptr;
    const size_t width = size_t(hf_ext::width(shape.dtype));
    shape.values = shape.base_values = width ? base.bytes() / width : 0;
    shape.row_length = row_length < 1 ? 1 : size_t(row_length);
    delta::Replacements changes;
    bool listed = false;
    if (!run([&] {
            require_sizes(shape, base, base);
            listed = delta::list_changes(shape, static_cast<const uint8_t*>(body.view.buf), body.bytes(), base.view.buf,
                                         changes, threads);
        }))
        return nullptr;
    if (!listed) Py_RETURN_NONE;
    return Py_BuildValue("(NN)", to_bytes(changes.places), to_bytes(changes.values));
}

// Parses the arguments of a function that takes a body but no base.
bool parse(PyObject* args, const char* format, Buffer& body, delta::Shape& shape) {
    PyObject* body_object;
    Py_ssize_t values, row_length, base_values;
    if (!PyArg_ParseTuple(args, format, &body_object, &shape.dtype, &values, &row_length, &base_values)) return false;
    if (!body.open(body_object, 0)) return false;
    if (values < 0 || row_length < 1 || base_values < 0) {
        PyErr_SetString(PyExc_TypeError, "a size is negative");
        return false;
    }
    shape.values = size_t(values);
    shape.row_length = size_t(row_length);
    shape.base_values = size_t(base_values);
    return true;
}

PyObject* factors(PyObject*, PyObject* args) {
    Buffer body;
    delta::Shape shape{};
    delta::StoredFactors stored;
    if (!parse(args, "Oinnn:factors", body, shape)) return nullptr;
    if (!run([&] {
            delta::check(shape);
            stored = delta::stored_factors(shape, static_cast<const uint8_t*>(body.view.buf), body.bytes());
        }))
        return nullptr;
    if (!stored.rank) Py_RETURN_NONE;
    return Py_BuildValue("(NNi)", to_bytes(stored.rows), to_bytes(stored.columns), stored.exponent);
}

PyObject* layout(PyObject*, PyObject* args) {
    Buffer body;
    delta::Shape shape{};
    delta::Layout all;
    if (!parse(args, "Oinnn:layout", body, shape)) return nullptr;
    if (!run([&] {
            delta::check(shape);
            all = delta::layout(shape, static_cast<const uint8_t*>(body.view.buf), body.bytes());
        }))
        return nullptr;
    return Py_BuildValue("(ifiiNNNNNNNNN)", all.plane, all.step, all.exponent, int(all.wide), to_bytes(all.rows),
                         to_bytes(all.row_scales), to_bytes(all.column_scales), to_bytes(all.frequencies),
                         to_bytes(all.classes), to_bytes(all.row_factors), to_bytes(all.column_factors), to_bytes(all.counts),
                         to_bytes(all.blocks));
}

PyObject* exchange(PyObject*, PyObject* args) {
    PyObject *tensor_object, *places_object, *others_object, *rows_object;
    Buffer tensor, places, others, rows;
    Py_ssize_t row_length;
    if (!PyArg_ParseTuple(args, "OOOnO:exchange", &tensor_object, &places_object, &others_object, &row_length, &rows_object))
        return nullptr;
    if (!tensor.open(tensor_object, PyBUF_WRITABLE) || !places.open(places_object, 0) ||
        !others.open(others_object, PyBUF_WRITABLE) || !rows.open(rows_object, PyBUF_WRITABLE))
        return nullptr;
    const size_t values = tensor.bytes() / 2, count = others.bytes() / 2, length = size_t(row_length);
    const auto work = [&] {
        if (places.bytes() != 4 * count || others.bytes() != 2 * count || tensor.bytes() != 2 * values)
            throw std::invalid_argument("the buffers do not hold places and values of 16 bits");
        if (row_length < 1 || rows.bytes() != (values + length - 1) / length)
            throw std::invalid_argument("the buffer of the rows has the wrong size");
        delta::exchange(static_cast<uint16_t*>(tensor.view.buf), values, static_cast<const uint32_t*>(places.view.buf),
                        static_cast<uint16_t*>(others.view.buf), count, length, static_cast<uint8_t*>(rows.view.buf));
    };
    if (!run(work, true)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* cast(PyObject*, PyObject* args) {
    PyObject *source_object, *target_object;
    Buffer source, target;
    int from, to;
    if (!PyArg_ParseTuple(args, "OiOi:cast", &source_object, &from, &target_object, &to)) return nullptr;
    if (!source.open(source_object, 0) || !target.open(target_object, PyBUF_WRITABLE)) return nullptr;
    if (!run([&] {
            const size_t from_width = size_t(width(from)), to_width = size_t(width(to));
            if (!from_width || !to_width) throw std::invalid_argument("unknown float type code");
            if (source.bytes() / from_width != target.bytes() / to_width)
                throw std::invalid_argument("the two buffers hold different numbers of values");
            hf_ext::cast(from, to, source.view.buf, target.view.buf, source.bytes() / from_width);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

// Converts bytes to numbers, or back: the arguments are those of `codes_to_numbers`, or of its inverse.
template <class From, class To, void CONVERT(delta::Codes, const From*, const uint8_t*, size_t, To*)>
PyObject* convert_codes(PyObject*, PyObject* args) {
    PyObject *source_object, *base_object, *target_object;
    Buffer source, base, target;
    int kind;
    if (!PyArg_ParseTuple(args, "iOOO", &kind, &source_object, &base_object, &target_object)) return nullptr;
    if (!source.open(source_object, 0) || !base.open(base_object, 0) || !target.open(target_object, PyBUF_WRITABLE))
        return nullptr;
    if (!run([&] {
            const auto codes = delta::Codes(kind);
            const size_t bytes = base.bytes(), all = bytes * (1 + sizeof(uint16_t) * delta::codes_in_byte(codes));
            if (source.bytes() + target.bytes() != all || (sizeof(From) == 1 ? source : target).bytes() != bytes)
                throw std::invalid_argument("the buffers hold different numbers of codes");
            CONVERT(codes, static_cast<const From*>(source.view.buf), static_cast<const uint8_t*>(base.view.buf), bytes,
                    static_cast<To*>(target.view.buf));
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* subtract(PyObject*, PyObject* args) {
    PyObject *tensor_object, *base_object, *change_object, *energies_object;
    Buffer tensor, base, change, energies;
    delta::Shape shape{};
    Py_ssize_t row_length;
    if (!PyArg_ParseTuple(args, "OOinOO:subtract", &tensor_object, &base_object, &shape.dtype, &row_length, &change_object,
                          &energies_object))
        return nullptr;
    if (!tensor.open(tensor_object, 0) || !base.open(base_object, 0) || !change.open(change_object, PyBUF_WRITABLE) ||
        !energies.open(energies_object, PyBUF_WRITABLE))
        return nullptr;
    const size_t width = size_t(hf_ext::width(shape.dtype));
    shape.values = shape.base_values = width ? tensor.bytes() / width : 0;
    shape.row_length = row_length < 1 ? 1 : size_t(row_length);
    if (!run([&] {
            require_sizes(shape, tensor, base);
            const size_t rows = (shape.values + shape.row_length - 1) / shape.row_length;
            if (change.bytes() != shape.values * sizeof(float) || energies.bytes() != rows * sizeof(double))
                throw std::invalid_argument("the buffers of the change or its energies have the wrong size");
            delta::subtract(shape, tensor.view.buf, base.view.buf, static_cast<float*>(change.view.buf),
                            static_cast<double*>(energies.view.buf));
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* fit_rows(PyObject*, PyObject* args) {
    PyObject *tensor_object, *base_object, *fixed_object, *inverse_object, *own_object;
    Buffer tensor, base, fixed, inverse, own;
    delta::WeightedChange change{};
    Py_ssize_t length;
    int by_columns, steps, threads = 1;
    if (!PyArg_ParseTuple(args, "OOiniipOOOi|i:fit_rows", &tensor_object, &base_object, &change.dtype, &length, &change.top,
                          &change.most, &by_columns, &fixed_object, &inverse_object, &own_object, &steps, &threads))
        return nullptr;
    if (!tensor.open(tensor_object, 0) || !base.open(base_object, 0) || !fixed.open(fixed_object, 0) ||
        !inverse.open(inverse_object, 0) || !own.open(own_object, PyBUF_WRITABLE))
        return nullptr;
    if (!run([&] {
            const size_t row = length < 1 ? 0 : size_t(hf_ext::width(change.dtype)) * size_t(length);
            if (!row || tensor.bytes() % row || base.bytes() != tensor.bytes() || !tensor.bytes())
                throw std::invalid_argument("the buffers of the tensor and its base have the wrong type or size");
            change.tensor = tensor.view.buf;
            change.base = base.view.buf;
            change.by_columns = by_columns;
            change.length = size_t(length);
            change.rows = tensor.bytes() / row;
            const auto rank = size_t(std::lround(std::sqrt(double(inverse.bytes() / sizeof(float)))));
            if (!rank) throw std::invalid_argument("the factors' buffers have the wrong sizes");
            const size_t fixed_rows = fixed.bytes() / (rank * sizeof(float));
            if (by_columns) {
                change.step = fixed_rows ? change.rows / fixed_rows : 0;
                change.rows = std::exchange(change.length, fixed_rows);
            }
            if (inverse.bytes() != rank * rank * sizeof(float) || fixed.bytes() != rank * change.length * sizeof(float) ||
                own.bytes() != rank * change.rows * sizeof(float) || (by_columns && !change.step))
                throw std::invalid_argument("the factors' buffers have the wrong sizes");
            if (change.most < 0 || change.most > 60 || std::abs(change.top) > 2000)
                throw std::invalid_argument("the limits of weights are impossible");
            delta::fit_rows(change, static_cast<const float*>(fixed.view.buf), static_cast<const float*>(inverse.view.buf),
                            rank, steps, static_cast<float*>(own.view.buf), threads);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* default_tables(PyObject*, PyObject*) {
    const auto bytes = [](const auto& tables) {
        return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(tables.data()), sizeof tables);
    };
    return Py_BuildValue("(NN)", bytes(delta::DEFAULT_TABLES), bytes(delta::GEOMETRIC_TABLES));
}

// Checks that all buffers hold the same number of values. Returns the width of the float type; on failure sets a Python
// exception and returns 0.
size_t common_values(int dtype, std::initializer_list<const Buffer*> buffers, size_t& values) {
    const size_t width = size_t(hf_ext::width(dtype));
    values = width ? (*buffers.begin())->bytes() / width : 0;
    for (const Buffer* buffer : buffers) {
        if (width && buffer->bytes() == values * width) continue;
        PyErr_SetString(PyExc_TypeError, width ? "the buffers hold different numbers of values" : "unknown float type code");
        return 0;
    }
    return width;
}

bool mask_fits(const Buffer& mask, size_t values) {
    if (!mask.view.obj || mask.bytes() == (values + 7) / 8) return true;
    PyErr_SetString(PyExc_TypeError, "the mask's buffer has the wrong size");
    return false;
}

PyObject* elect(PyObject*, PyObject* args) {
    PyObject *base_object, *tasks_object, *elected_object, *masks_object, *sums_object;
    int dtype, threads = 1;
    if (!PyArg_ParseTuple(args, "iOO!OOO|i:elect", &dtype, &base_object, &PyTuple_Type, &tasks_object, &elected_object,
                          &masks_object, &sums_object, &threads))
        return nullptr;
    const size_t count = size_t(PyTuple_Size(tasks_object));
    Buffer base, elected, masks, sums;
    std::vector<Buffer> tasks(count);
    if (!base.open(base_object, 0) || !elected.open(elected_object, PyBUF_WRITABLE) ||
        !masks.open(masks_object, PyBUF_WRITABLE) || !sums.open(sums_object, PyBUF_WRITABLE))
        return nullptr;
    std::vector<const void*> pointers(count);
    size_t values = 0;
    for (size_t i = 0; i < count; ++i) {
        if (!tasks[i].open(PyTuple_GetItem(tasks_object, Py_ssize_t(i)), 0)) return nullptr;
        if (!common_values(dtype, {&base, &elected, &tasks[i]}, values)) return nullptr;
        pointers[i] = tasks[i].view.buf;
    }
    if (!count || masks.bytes() != count * ((values + 7) / 8) || sums.bytes() != count * sizeof(emr::Sums)) {
        PyErr_SetString(PyExc_TypeError, "the buffers of the masks or the sums have the wrong size");
        return nullptr;
    }
    if (!run([&] {
            emr::elect(dtype, values, base.view.buf, pointers.data(), count, elected.view.buf,
                       static_cast<uint8_t*>(masks.view.buf), static_cast<emr::Sums*>(sums.view.buf), threads);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* modulate(PyObject*, PyObject* args) {
    PyObject *base_object, *elected_object, *mask_object, *out_object;
    Buffer base, elected, mask, out;
    emr::Modulator task{};
    int dtype, threads = 1;
    if (!PyArg_ParseTuple(args, "iOOOdO|i:modulate", &dtype, &base_object, &elected_object, &mask_object, &task.scale,
                          &out_object, &threads))
        return nullptr;
    size_t values;
    if (!base.open(base_object, 0) || !elected.open(elected_object, 0) || !mask.open(mask_object, 0) ||
        !out.open(out_object, PyBUF_WRITABLE) || !common_values(dtype, {&base, &elected, &out}, values) ||
        !mask_fits(mask, values))
        return nullptr;
    task.mask = static_cast<const uint8_t*>(mask.view.buf);
    if (!run([&] { emr::modulate(dtype, values, base.view.buf, elected.view.buf, task, out.view.buf, threads); }, true))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* retarget(PyObject*, PyObject* args) {
    PyObject* tuples;
    int threads = 1;
    if (!PyArg_ParseTuple(args, "O!|i:retarget", &PyTuple_Type, &tuples, &threads)) return nullptr;
    struct Buffers {
        Buffer base, elected, from, to, live;
    };
    const size_t count = size_t(PyTuple_Size(tuples));
    std::vector<Buffers> buffers(count);
    std::vector<emr::Target> targets(count);
    for (size_t i = 0; i < count; ++i) {
        Buffers& opened = buffers[i];
        emr::Target& target = targets[i];
        PyObject *tuple = PyTuple_GetItem(tuples, Py_ssize_t(i)), *base, *elected, *from, *to, *live;
        if (!PyTuple_Check(tuple)) {
            PyErr_SetString(PyExc_TypeError, "retarget takes a tuple of tuples");
            return nullptr;
        }
        if (!PyArg_ParseTuple(tuple, "iOOOdOdO:retarget", &target.dtype, &base, &elected, &from, &target.from.scale, &to,
                              &target.to.scale, &live) ||
            !opened.base.open(base, 0) || !opened.elected.open(elected, 0) || !opened.from.open(from, 0) ||
            !opened.to.open(to, 0) || !opened.live.open(live, PyBUF_WRITABLE) ||
            !common_values(target.dtype, {&opened.base, &opened.elected, &opened.live}, target.values) ||
            !mask_fits(opened.from, target.values) || !mask_fits(opened.to, target.values))
            return nullptr;
        target.base = opened.base.view.buf;
        target.elected = opened.elected.view.buf;
        target.from.mask = static_cast<const uint8_t*>(opened.from.view.buf);
        target.to.mask = static_cast<const uint8_t*>(opened.to.view.buf);
        target.live = opened.live.view.buf;
    }
    size_t index = 0;
    if (!run([&] { index = emr::retarget(targets.data(), count, threads); }, true)) return nullptr;
    return PyLong_FromSize_t(index);
}

PyObject* check_with(PyObject*, PyObject* function) {
    Py_XDECREF(check_function);
    check_function = Py_NewRef(function);
    Py_RETURN_NONE;
}

PyObject* instruction_sets(PyObject*, PyObject*) {
    const std::vector<Instructions> sets = supported_instructions();
    PyObject* names = PyTuple_New(Py_ssize_t(sets.size()));
    for (size_t i = 0; names && i < sets.size(); ++i)
        PyTuple_SetItem(names, Py_ssize_t(i), PyUnicode_FromString(INSTRUCTIONS[int(sets[i])]));
    return names;
}

PyObject* use(PyObject*, PyObject* name) {
    for (const Instructions set : supported_instructions()) {
        if (!PyUnicode_Check(name) || PyUnicode_CompareWithASCIIString(name, INSTRUCTIONS[int(set)]) != 0) continue;
        return PyUnicode_FromString(INSTRUCTIONS[int(hf_ext::instructions().exchange(set))]);
    }
    PyErr_SetString(PyExc_ValueError, "this processor or build has no such instruction set; instruction_sets() lists them");
    return nullptr;
}

// hf_ext/_native.pyi says what each takes and returns.
PyMethodDef METHODS[] = {
    {"encode_coarse", encode_coarse, METH_VARARGS, nullptr},
    {"encode", encode, METH_VARARGS, nullptr},
    {"decode", decode, METH_VARARGS, nullptr},
    {"list_changes", list_changes, METH_VARARGS, nullptr},
    {"factors", factors, METH_VARARGS, nullptr},
    {"layout", layout, METH_VARARGS, nullptr},
    {"exchange", exchange, METH_VARARGS, nullptr},
    {"cast", cast, METH_VARARGS, nullptr},
    {"codes_to_numbers", convert_codes<uint8_t, uint16_t, delta::codes_to_numbers>, METH_VARARGS, nullptr},
    {"numbers_to_codes", convert_codes<uint16_t, uint8_t, delta::numbers_to_codes>, METH_VARARGS, nullptr},
    {"subtract", subtract, METH_VARARGS, nullptr},
    {"fit_rows", fit_rows, METH_VARARGS, nullptr},
    {"count_symbols", count_symbols, METH_VARARGS, nullptr},
    {"default_tables", default_tables, METH_NOARGS, nullptr},
    {"check_with", check_with, METH_O, nullptr},
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {"use", use, METH_O, nullptr},
    {"elect", elect, METH_VARARGS, nullptr},
    {"modulate", modulate, METH_VARARGS, nullptr},
    {"retarget", retarget, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "The delta codec and the kernels of EMR-Merging.", 0, METHODS};

}  // namespace
}  // namespace hf_ext

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&hf_ext::MODULE); }
