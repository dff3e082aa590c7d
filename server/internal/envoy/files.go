package envoy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// Read reads the rules of a file, or of all .yaml and .yml files of a folder. A file is one of Envoy's reference service, or a
// policy file. The error has all mistakes. Between two files Read ends with ctx.
func Read(ctx context.Context, path string) (*Rules, error) {
	paths, err := filesOf(path)
	if err != nil {
		return nil, err
	}
	var domains []policyfile.EnvoyDomain
	var errs []error
	for _, path := range paths {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		some, err := readFile(path)
		if err != nil {
			errs = append(errs, err)
		}
		domains = append(domains, some...)
	}
	if errs != nil {
		return nil, errors.Join(errs...)
	}
	return newRules(domains)
}

func filesOf(path string) (paths []string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		name := filepath.Join(path, entry.Name())
		extension := filepath.Ext(name)
		if strings.HasPrefix(entry.Name(), ".") { // as of a mounted ConfigMap
			continue
		}
		if entry.IsDir() {
			return nil, fmt.Errorf("%s is a folder in a folder of rules: move its files one up, or give it a name that begins with a dot", name)
		}
		if extension != ".yaml" && extension != ".yml" {
			return nil, fmt.Errorf("%s does not end in .yaml or .yml: rename it, or give it a name that begins with a dot", name)
		}
		paths = append(paths, name)
	}
	if paths == nil {
		return nil, fmt.Errorf("%s has no file whose name ends in .yaml or .yml", path)
	}
	return paths, nil
}

func readFile(path string) ([]policyfile.EnvoyDomain, error) {
	data, err := readRegular(path)
	if err != nil {
		return nil, err
	}
	return policyfile.ParseEnvoy(path, data)
}

// readRegular reads a regular file. A pipe or a device may never end.
func readRegular(path string) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // else to open a pipe waits for who writes to it
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file: write the rules to one", path)
	}
	return io.ReadAll(io.LimitReader(file, policyfile.MaxBytes+1))
}
