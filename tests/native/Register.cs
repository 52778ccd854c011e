// Registers the library through ONNX Runtime's C# API and opens a model, without the CUDA provider that
// examples/csharp asks for first: on a machine without a GPU the library itself is heard.  Takes the same words.
using System;
using Microsoft.ML.OnnxRuntime;

static class Register
{
    static int Main(string[] words)
    {
        try
        {
            using (SessionOptions options = new SessionOptions())
            {
                options.RegisterCustomOpLibrary(words[3]);
                using (new InferenceSession(words[0], options)) return 0;
            }
        }
        catch (OnnxRuntimeException error)
        {
            Console.Error.WriteLine(error.Message);
            return 1;
        }
    }
}
