// Runs a fused model with ONNX Runtime's C# API: no Python, no compiler.
//
//   deploy MODEL INPUTS OUTPUTS [LIBRARY]
//
// Reads INPUTS/NAME.npy for every input of the model and writes OUTPUTS/NAME.npy for every output.  With LIBRARY, the
// path of libonnxfuse.so, fused nodes run as CUDA kernels, which the model must hold:
//
//   onnxfuse optimize model.onnx --embed sm_80,sm_90
//
// Without it the model runs on the CPU, and ONNX Runtime puts the original nodes in the fused nodes' places.
using System;
using System.Collections.Generic;
using System.IO;
using Microsoft.ML.OnnxRuntime;

namespace Deploy
{
    static class Program
    {
        static int Main(string[] words)
        {
            if (words.Length != 3 && words.Length != 4)
            {
                Console.Error.WriteLine("usage: deploy MODEL INPUTS OUTPUTS [LIBRARY]");
                return 2;
            }
            try
            {
                Run(words[0], words[1], words[2], words.Length == 4 ? words[3] : null);
                return 0;
            }
            catch (Exception error) when (error is OnnxRuntimeException || error is IOException || error is FormatException)
            {
                Console.Error.WriteLine(error.Message);
                return 1;
            }
        }

        static SessionOptions Options(string library)
        {
            if (library == null) return new SessionOptions();
            SessionOptions options = SessionOptions.MakeSessionOptionWithCudaProvider(0);
            options.RegisterCustomOpLibrary(library);
            return options;
        }

        static void Run(string model, string inputs, string outputs, string library)
        {
            // Kernels are loaded when the session is created; one that cannot be had for this GPU is an exception then.
            using (SessionOptions options = Options(library))
            using (InferenceSession session = new InferenceSession(model, options))
            using (RunOptions run = new RunOptions())
            {
                List<OrtValue> given = new List<OrtValue>();
                try
                {
                    foreach (string name in session.InputNames) given.Add(Npy.Read(Path.Combine(inputs, name + ".npy")));
                    using (var results = session.Run(run, session.InputNames, given, session.OutputNames))
                    {
                        for (int i = 0; i < results.Count; ++i)
                        {
                            string name = session.OutputNames[i];
                            long[] shape = Npy.Write(Path.Combine(outputs, name + ".npy"), results[i]);
                            Console.WriteLine(string.Join(" ", name, string.Join(" ", shape)).TrimEnd());
                        }
                    }
                }
                finally
                {
                    foreach (OrtValue value in given) value.Dispose();
                }
            }
        }
    }
}
