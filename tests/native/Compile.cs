// The C# compiler as a program: npm and PyPI carry its libraries alone.  It takes the words of csc; warnings are errors
// where -warnaserror says so.
using System;
using System.IO;
using System.Linq;
using Microsoft.CodeAnalysis;
using Microsoft.CodeAnalysis.CSharp;

static class Compile
{
    static int Main(string[] words)
    {
        var given = CSharpCommandLineParser.Default.Parse(words, Directory.GetCurrentDirectory(), null);
        var compilation = CSharpCompilation.Create(
            given.CompilationName,
            given.SourceFiles.Select(
                file => CSharpSyntaxTree.ParseText(File.ReadAllText(file.Path), given.ParseOptions, file.Path)),
            given.MetadataReferences.Select(reference => MetadataReference.CreateFromFile(reference.Reference)),
            given.CompilationOptions);
        var told = given.Errors.AddRange(compilation.GetDiagnostics()).Where(
            each => each.Severity >= DiagnosticSeverity.Warning).ToList();
        foreach (var each in told) Console.Error.WriteLine(each);
        if (told.Any(each => each.Severity == DiagnosticSeverity.Error)) return 1;
        return compilation.Emit(Path.Combine(given.OutputDirectory, given.OutputFileName)).Success ? 0 : 1;
    }
}
