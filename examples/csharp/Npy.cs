// Arrays in NumPy's .npy files: those that np.save writes, in C's order.
using System;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.RegularExpressions;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Deploy
{
    static class Npy
    {
        // As NumPy spells a type, the type, and the size of an element.
        static readonly (string Name, TensorElementType Type, int Size)[] Types =
        {
            ("<f4", TensorElementType.Float, 4), ("<f2", TensorElementType.Float16, 2),
            ("<f8", TensorElementType.Double, 8), ("<i8", TensorElementType.Int64, 8),
            ("<i4", TensorElementType.Int32, 4), ("<i2", TensorElementType.Int16, 2),
            ("|i1", TensorElementType.Int8, 1), ("|u1", TensorElementType.UInt8, 1),
            ("<u4", TensorElementType.UInt32, 4), ("<u8", TensorElementType.UInt64, 8),
            ("<u2", TensorElementType.UInt16, 2), ("|b1", TensorElementType.Bool, 1),
        };

        // The header is a Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }.
        static readonly Regex Header = new Regex(
            @"'descr': '(?<type>[^']*)', 'fortran_order': (?<fortran>\w+), 'shape': \((?<shape>[\d, ]*)\)");

        const string Magic = "\u0093NUMPY";

        public static OrtValue Read(string path)
        {
            byte[] raw = File.Exists(path) ? File.ReadAllBytes(path) : new byte[0];
            if (raw.Length < 12 || Latin(raw, 0, 6) != Magic) throw new FormatException(path + ": missing, or no .npy file");
            // The header's length has two bytes in the first version, four in later ones.
            int before = raw[6] == 1 ? 10 : 12;
            long length = raw[6] == 1 ? BitConverter.ToUInt16(raw, 8) : BitConverter.ToUInt32(raw, 8);
            if (before + length > raw.Length) throw new FormatException(path + ": cut short");
            int start = before + (int)length;
            Match header = Header.Match(Latin(raw, before, (int)length));
            if (!header.Success) throw new FormatException(path + ": missing, or no .npy file");
            if (header.Groups["fortran"].Value != "False") throw new FormatException(path + ": not in C's order");
            string name = header.Groups["type"].Value;
            var type = Types.FirstOrDefault(each => each.Name == name);
            if (type.Name == null) throw new FormatException(path + ": elements of type " + name);
            long[] shape = header.Groups["shape"].Value.Split(new[] { ',', ' ' }, StringSplitOptions.RemoveEmptyEntries)
                .Select(long.Parse).ToArray();
            long size = shape.Aggregate((long)type.Size, (product, each) => product * each);
            if (raw.Length - start != size) throw new FormatException(path + ": cut short");

            OrtValue value = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, type.Type, shape);
            new ReadOnlySpan<byte>(raw, start, raw.Length - start).CopyTo(value.GetTensorMutableRawData());
            return value;
        }

        // Gives the array's shape.
        public static long[] Write(string path, OrtValue value)
        {
            OrtTensorTypeAndShapeInfo info = value.GetTensorTypeAndShape();
            var type = Types.FirstOrDefault(each => each.Type == info.ElementDataType);
            if (type.Name == null)
                throw new FormatException(path + ": no .npy file holds elements of type " + info.ElementDataType);
            string sizes = string.Concat(info.Shape.Select(size => size + ", "));
            string header = "{'descr': '" + type.Name + "', 'fortran_order': False, 'shape': (" + sizes + "), }";
            header = header.PadRight(header.Length + 63 - (header.Length + 10) % 64) + "\n";  // data at a multiple of 64
            using (FileStream file = File.Create(path))
            {
                byte[] front = Encoding.GetEncoding("iso-8859-1").GetBytes(
                    Magic + "\u0001\u0000" + (char)(header.Length & 255) + (char)(header.Length >> 8) + header);
                byte[] data = value.GetTensorMutableRawData().ToArray();
                file.Write(front, 0, front.Length);
                file.Write(data, 0, data.Length);
            }
            return info.Shape;
        }

        static string Latin(byte[] raw, int start, int length)
        {
            return Encoding.GetEncoding("iso-8859-1").GetString(raw, start, length);
        }
    }
}
