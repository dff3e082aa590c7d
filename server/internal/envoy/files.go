package envoy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// Read reads the rules of a file, or of all files of a folder whose names end in .yaml or .yml. A file is one of Envoy's
// reference service, or a policy file. It tells of all mistakes.
func Read(path string) (*Rules, error) {
	paths, err := filesOf(path)
	if err != nil {
		return nil, err
	}
	var domains []policyfile.EnvoyDomain
	var errs []error
	for _, path := range paths {
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
		if extension == ".yaml" || extension == ".yml" {
			paths = append(paths, name)
		}
	}
	if paths == nil {
		return nil, fmt.Errorf("%s has no file whose name ends in .yaml or .yml", path)
	}
	return paths, nil
}

func readFile(path string) ([]policyfile.EnvoyDomain, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if !isPolicyFile(data) {
		domain, err := policyfile.ParseEnvoy(path, data)
		return []policyfile.EnvoyDomain{domain}, err
	}
	file, err := policyfile.Parse(path, data)
	if err != nil {
		return nil, err
	}
	rules, err := file.Rules("")
	if err != nil {
		return nil, err
	}
	return rules.Envoy, nil
}

// isPolicyFile tells a policy file by its sections. What cannot be read is none.
func isPolicyFile(data []byte) bool {
	var root struct{ Envoy, Policies, Domain any }
	return yaml.Unmarshal(data, &root) == nil && root.Domain == nil && (root.Envoy != nil || root.Policies != nil)
}
