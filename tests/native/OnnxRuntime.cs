// As much of ONNX Runtime's C# API as examples/csharp uses, with its signatures: a model gives its inputs back, by the
// names that its file lists.  Here the program is compiled and run where there is no .NET SDK and no package.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Microsoft.ML.OnnxRuntime.Tensors
{
    public enum TensorElementType
    {
        Float = 1, UInt8 = 2, Int8 = 3, UInt16 = 4, Int16 = 5, Int32 = 6, Int64 = 7, String = 8, Bool = 9, Float16 = 10,
        Double = 11, UInt32 = 12, UInt64 = 13, Complex64 = 14, Complex128 = 15, BFloat16 = 16, DataTypeMax = 17
    }
}

namespace Microsoft.ML.OnnxRuntime
{
    public class OnnxRuntimeException : Exception
    {
        internal OnnxRuntimeException(string message) : base(message) { }
    }

    public class OrtAllocator
    {
        public static OrtAllocator DefaultInstance { get; } = new OrtAllocator();
    }

    public struct OrtTensorTypeAndShapeInfo
    {
        internal OrtTensorTypeAndShapeInfo(TensorElementType type, long[] shape) { ElementDataType = type; Shape = shape; }
        public TensorElementType ElementDataType { get; private set; }
        public long[] Shape { get; private set; }
    }

    public class OrtValue : IDisposable
    {
        byte[] data;
        OrtTensorTypeAndShapeInfo info;

        public static OrtValue CreateAllocatedTensorValue(OrtAllocator allocator, TensorElementType elementType, long[] shape)
        {
            long size = shape.Aggregate((long)Sizes[elementType], (product, each) => product * each);
            return new OrtValue { data = new byte[size], info = new OrtTensorTypeAndShapeInfo(elementType, shape) };
        }

        public Span<byte> GetTensorMutableRawData() { return new Span<byte>(data); }
        public OrtTensorTypeAndShapeInfo GetTensorTypeAndShape() { return info; }
        public void Dispose() { data = null; }
        internal OrtValue Copy() { return new OrtValue { data = (byte[])data.Clone(), info = info }; }

        static readonly Dictionary<TensorElementType, int> Sizes = new Dictionary<TensorElementType, int>
        {
            { TensorElementType.Float, 4 }, { TensorElementType.UInt8, 1 }, { TensorElementType.Int8, 1 },
            { TensorElementType.UInt16, 2 }, { TensorElementType.Int16, 2 }, { TensorElementType.Int32, 4 },
            { TensorElementType.Int64, 8 }, { TensorElementType.Bool, 1 }, { TensorElementType.Float16, 2 },
            { TensorElementType.Double, 8 }, { TensorElementType.UInt32, 4 }, { TensorElementType.UInt64, 8 },
        };
    }

    public interface IDisposableReadOnlyCollection<T> : IReadOnlyCollection<T>, IReadOnlyList<T>, IDisposable { }

    class Results : List<OrtValue>, IDisposableReadOnlyCollection<OrtValue>
    {
        public Results(IEnumerable<OrtValue> values) : base(values) { }
        public void Dispose() { ForEach(value => value.Dispose()); }
    }

    public class RunOptions : IDisposable
    {
        public void Dispose() { }
    }

    public class SessionOptions : IDisposable
    {
        bool cuda;
        public static SessionOptions MakeSessionOptionWithCudaProvider(int deviceId = 0)
        {
            return new SessionOptions { cuda = true };
        }

        public void RegisterCustomOpLibrary(string libraryPath)
        {
            if (!cuda || !File.Exists(libraryPath)) throw new OnnxRuntimeException("no such library: " + libraryPath);
        }

        public void Dispose() { }
    }

    public class InferenceSession : IDisposable
    {
        public InferenceSession(string modelPath, SessionOptions options)
        {
            if (!File.Exists(modelPath)) throw new OnnxRuntimeException("no such model: " + modelPath);
            InputNames = OutputNames = File.ReadAllLines(modelPath);
        }

        public IReadOnlyList<string> InputNames { get; }
        public IReadOnlyList<string> OutputNames { get; }

        public IDisposableReadOnlyCollection<OrtValue> Run(RunOptions runOptions, IReadOnlyCollection<string> inputNames,
            IReadOnlyCollection<OrtValue> inputValues, IReadOnlyCollection<string> outputNames)
        {
            return new Results(inputValues.Select(value => value.Copy()));
        }

        public void Dispose() { }
    }
}
